-- What becomes of a waiting task that was not started in time: its state, error code and error. `decide` in tasklib/outcomes.py says the
-- same of a task that a worker holds.
create or replace function tasklib.ended_late(expires_at timestamptz, deadline_at timestamptz, last_error text)
    returns table (state text, error_code text, error text)
    language sql stable
    set search_path = pg_catalog, pg_temp
as $$
    select case when is_expired then 'expired' else 'failed' end,
           case when is_expired then 'EXPIRED' else 'DEADLINE_PASSED' end,
           case when not is_expired
                then concat_ws(E'\n', 'DeadlinePassed: not started before the deadline ' || deadline_at, last_error)
                else coalesce(last_error, 'Expired: not started before ' || expires_at) end
      from (select coalesce(expires_at < deadline_at, expires_at is not null)) as known (is_expired)
$$;
