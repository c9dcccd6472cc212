-- Asks for permits of a queue with a cap, or gives some back. Afterwards the worker holds `permits`, and should come down to
-- `target` as its tasks end. Null: the queue has no cap (any more). `again_seconds` is when a closed gate opens by itself.
--
-- `keeps` is the most that the worker may be executing until it has the answer. It lowers its own limit before it asks. To say
-- what executes at the moment of asking is not enough: starts go on while the call is under way (4 to 9 starts over a cap of 10 in
-- each of four runs).
-- The lock comes first, and what the queue and the permits say is read by later statements, which see what the holder before has
-- committed. So the function refuses a transaction with an older snapshot. It takes no lock on the queue's row: an operator who
-- leaves a transaction open holds up no worker.
-- While others want more than they have, a worker's target is its share, rounded up: rounded down, four workers would leave a fifth
-- of a cap unused.
create or replace function tasklib.permit(
    queue text, worker_id text, wants integer, keeps integer,
    out permits integer, out target integer, out breaker text, out breaker_epoch bigint, out again_seconds double precision
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
    cap integer;
    had integer;
    others integer;
    hungry integer;
    claimants integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'permits are given in read committed transactions' using errcode = '25001';
    end if;
    perform pg_advisory_xact_lock(hashtextextended('tasklib.permits ' || queue, 0));
    select limits.cap, limits.breaker, limits.breaker_epoch,
           case when limits.breaker = 'open' then extract(epoch from limits.open_until - clock_timestamp()) end
      into cap, breaker, breaker_epoch, again_seconds
      from tasklib.queue_limits as limits where limits.queue = permit.queue;
    if cap is null then
        delete from tasklib.permits as held where held.queue = permit.queue and held.worker_id = permit.worker_id;
        return;
    end if;
    select coalesce(sum(held.permits) filter (where held.worker_id = permit.worker_id), 0),
           coalesce(sum(held.permits) filter (where held.worker_id <> permit.worker_id), 0),
           count(*) filter (where held.worker_id <> permit.worker_id and held.wanted > held.permits),
           count(*) filter (where held.worker_id <> permit.worker_id) + 1
      into had, others, hungry, claimants
      from tasklib.permits as held where held.queue = permit.queue;
    target := greatest(
        least(wants, cap - others, case when hungry > 0 then (cap + claimants - 1) / claimants else wants end), 0);
    permits := greatest(target, keeps);
    if wants = 0 and permits = 0 then
        delete from tasklib.permits as held where held.queue = permit.queue and held.worker_id = permit.worker_id;
    else
        insert into tasklib.permits as held (queue, worker_id, permits, wanted)
        values (permit.queue, permit.worker_id, permit.permits, greatest(wants, permits))
        on conflict on constraint permits_pkey
        do update set permits = excluded.permits, wanted = excluded.wanted, since = clock_timestamp()
         where held.permits <> excluded.permits or held.wanted <> excluded.wanted;
    end if;
    if permits < had and hungry > 0 then
        perform tasklib.ring(permit.queue);
    end if;
end
$$;
