-- What a raw INSERT leaves out: whether the task is ready, the rest of its lease, a code for its error.
-- The library always says `ready` itself, so that for its rows only the WHEN clause is
-- evaluated and this function is never called.
create or replace function tasklib.task_defaults() returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    new.ready := case new.state
        when 'pending' then new.scheduled_at <= clock_timestamp() and new.pending_parents = 0
        when 'failed' then coalesce(new.next_retry_at <= clock_timestamp(), false)
        else false
    end;
    if new.state in ('claimed', 'running') then
        new.claimed_at := coalesce(new.claimed_at, new.started_at, clock_timestamp());
        new.fencing_token := greatest(new.fencing_token, 1);
    end if;
    if new.state in ('failed', 'cancelled', 'expired', 'buried') then
        new.error_code := coalesce(new.error_code, upper(new.state));
    end if;
    return new;
end
$$;

create or replace trigger task_defaults before insert on tasklib.tasks
    for each row when (new.ready is null) execute function tasklib.task_defaults();
