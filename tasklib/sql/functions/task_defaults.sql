-- Fills in what a raw INSERT leaves out: whether the task is ready, when it becomes due or expires, the rest of its lease, and
-- a code for its error. It also computes the digest of what is submitted under a key, so that no writer can forget or forge
-- it. The library always gives all other values. So only the WHEN clause is evaluated for its rows without a key, and this
-- function is never called.
create or replace function tasklib.task_defaults() returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    new.ready := coalesce(new.ready, case new.state
        when 'pending' then new.scheduled_at <= clock_timestamp() and new.pending_parents = 0
        when 'failed' then coalesce(new.next_retry_at <= clock_timestamp(), false)
        else false
    end);
    if new.state = 'pending' or new.next_retry_at is not null then
        new.due_at := coalesce(new.due_at, least(
            case when not new.ready and new.pending_parents = 0 then coalesce(new.next_retry_at, new.scheduled_at) end,
            new.expires_at, new.deadline_at));
    end if;
    if new.state in ('claimed', 'running') then
        new.claimed_at := coalesce(new.claimed_at, new.started_at, clock_timestamp());
        new.fencing_token := greatest(new.fencing_token, 1);
        new.attempt := greatest(new.attempt, (new.state = 'running')::integer);
        if new.worker_id is not null and new.locked_until is not null then
            -- With a claim, the task is recovered when its lock has passed, like any claimed task.
            insert into tasklib.claims (worker_id, locked_until, task_ids)
            values (new.worker_id, new.locked_until, array[new.id]);
        end if;
    end if;
    new.payload_digest := case when new.idempotency_key is not null
        then tasklib.keyed_digest(tasklib.payload_digest(new.name, new.args, new.kwargs)) end;
    if new.state in ('failed', 'cancelled', 'expired', 'buried') then
        new.error_code := coalesce(new.error_code, upper(new.state));
    end if;
    return new;
end
$$;

create or replace trigger task_defaults before insert on tasklib.tasks
    for each row when (
        new.ready is null or new.idempotency_key is not null or new.payload_digest is not null
        or new.due_at is null and (new.state = 'pending' or new.next_retry_at is not null)
            and (not new.ready or coalesce(new.expires_at, new.deadline_at) is not null))
    execute function tasklib.task_defaults();
