-- Makes tasks claimable whose time has come, the longest due first. Waits for nobody: whoever holds a row is promoting
-- it, or cancelling it. Answers how many, and in how many seconds the next one is due (null: none is known).
--
-- The clock is read in a subselect: as a bare volatile function it could not bound the index scan.
create or replace function tasklib.promote(out promoted bigint, out next_due_seconds double precision)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
declare
    queues text[];
begin
    with due as (
        update tasklib.tasks
           set ready = true, due_at = least(expires_at, deadline_at)
         where id = any(array(
             select id from tasklib.tasks
              where due_at <= (select clock_timestamp()) and not ready and pending_parents = 0
                and coalesce(least(expires_at, deadline_at) > clock_timestamp(), true)
              order by due_at
              limit 1000
              for update skip locked))
        returning queue
    )
    select count(*), array_agg(distinct queue) into promoted, queues from due;
    if promoted > 0 then
        perform tasklib.ring_all(queues);
    end if;
    -- What is overdue and was left is in somebody else's hands: to wait zero seconds for it would be to spin.
    select extract(epoch from min(due_at) - clock_timestamp()) into next_due_seconds
      from tasklib.tasks
     where due_at > (select clock_timestamp());
end
$$;
