-- Ends waiting tasks that were not started before their expires_at. Answers how many.
create or replace function tasklib.expire() returns bigint
    language sql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $$
    with expired as (
        update tasklib.tasks
           set state = 'expired', ready = false, due_at = null, next_retry_at = null, completed_at = clock_timestamp(),
               error_code = 'EXPIRED', error = coalesce(error, 'Expired: not started before ' || expires_at)
         where id = any(array(
             select id from tasklib.tasks
              where due_at <= (select clock_timestamp()) and expires_at <= clock_timestamp()
              order by due_at
              limit 1000
              for update skip locked))
        returning 1
    )
    select count(*) from expired
$$;
