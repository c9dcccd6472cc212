-- Ends waiting tasks that were not started before their expires_at, as expired, or before their deadline_at, as failed. If both have
-- passed, the earlier one counts. Answers how many.
create or replace function tasklib.expire() returns bigint
    language sql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
    with expired as (
        update tasklib.tasks
           set (state, error_code, error) = (select * from tasklib.ended_late(expires_at, deadline_at, error)),
               ready = false, due_at = null, next_retry_at = null, completed_at = clock_timestamp()
         where id = any(array(
             select id from tasklib.tasks
              where due_at <= (select clock_timestamp()) and least(expires_at, deadline_at) <= clock_timestamp()
              order by due_at
              limit 1000
              for update skip locked))
        returning 1
    )
    select count(*) from expired
$$;
