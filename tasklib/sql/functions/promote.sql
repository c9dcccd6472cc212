-- Makes tasks ready whose time has come, the longest due first. It skips locked rows: another session is promoting or
-- cancelling them. Answers how many it has promoted, and in how many seconds the next one is due (null: none is known).
--
-- The clock is read in a subselect: a bare volatile function could not bound the index scan.
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
    -- Overdue tasks that are left are locked by other sessions. They do not count here, or the caller would spin.
    select extract(epoch from min(due_at) - clock_timestamp()) into next_due_seconds
      from tasklib.tasks
     where due_at > (select clock_timestamp());
end
$$;
