-- Submits one task, in the caller's transaction. `existed` is true if the idempotency key had already been used for the same
-- payload: then `id` is that of the first task.
--
--     select * from tasklib.submit('send_email', '{"to": "alice@example.com"}', delay_seconds => 60);
--
-- An option that is left out, or null, has the value of the task's function: see task_functions. `timeout_seconds =>
-- 'infinity'` means no timeout. A submitter that knows the function gives all options, and nothing is looked up. on_crash may
-- stay null: then the worker asks the function.
-- Security definer, so that a submitter needs no right on the table itself.
create or replace function tasklib.submit(
    name text,
    kwargs jsonb default '{}',
    args jsonb default '{}',
    queue text default null,
    priority integer default null,
    delay_seconds double precision default 0,
    scheduled_at timestamptz default null,
    expires_at timestamptz default null,
    max_retries integer default null,
    timeout_seconds double precision default null,
    tags jsonb default '{}',
    idempotency_key text default null,
    store_result boolean default null,
    on_crash text default null,
    inout id uuid default null,
    out existed boolean
)
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    submitted_at constant timestamptz := clock_timestamp();
    starts_at constant timestamptz := coalesce(
        submit.scheduled_at, submitted_at + submit.delay_seconds * interval '1 second');
    earlier_id uuid;
begin
    -- Nulls are refused here, and other values by the domains below: the table would refuse them too, but log the whole row.
    if num_nulls(submit.name, submit.kwargs, submit.args, submit.delay_seconds, submit.tags) > 0 then
        raise exception 'name, kwargs, args, delay_seconds and tags must not be null'
            using errcode = 'not_null_violation', hint = 'Leave out a parameter to get its default.';
    end if;
    if num_nulls(submit.queue, submit.priority, submit.max_retries, submit.timeout_seconds, submit.store_result) > 0 then
        select coalesce(submit.queue, said.queue, 'default'), coalesce(submit.priority, said.priority, 0),
               coalesce(submit.max_retries, said.max_retries, 3),
               coalesce(submit.timeout_seconds, said.timeout_seconds),
               coalesce(submit.store_result, said.store_result, true),
               coalesce(submit.on_crash, nullif(said.on_crash, 'retry'))
          into submit.queue, submit.priority, submit.max_retries, submit.timeout_seconds, submit.store_result,
               submit.on_crash
          from (values (0)) as one left join tasklib.task_functions as said on said.name = submit.name;
    end if;
    if submit.delay_seconds < 0 then
        raise exception 'delay_seconds must not be negative' using errcode = 'TL400';
    end if;
    if submit.delay_seconds <> 0 and submit.scheduled_at is not null then
        raise exception 'give delay_seconds or scheduled_at, not both' using errcode = 'TL400';
    end if;
    submit.id := coalesce(submit.id, tasklib.uuid7());
    submit.existed := false;
    -- A second try is needed only if the earlier task was deleted in between. The tries are bounded, because a unique index
    -- or a trigger that is not ours may refuse the row in silence.
    for attempt in 1..10 loop
        insert into tasklib.tasks (
            id, name, args, kwargs, queue, priority, created_at, scheduled_at, ready, due_at, expires_at,
            max_retries, timeout_seconds, tags, idempotency_key, store_result, on_crash)
        values (
            submit.id, submit.name, submit.args, submit.kwargs, submit.queue, submit.priority,
            submitted_at, starts_at, starts_at <= submitted_at,
            least(case when starts_at > submitted_at then starts_at end, submit.expires_at), submit.expires_at,
            submit.max_retries::tasklib.given_retries,
            nullif(submit.timeout_seconds, 'infinity')::tasklib.given_timeout,
            submit.tags, submit.idempotency_key, submit.store_result, submit.on_crash::tasklib.given_crash_policy)
        on conflict do nothing;
        if found then
            return;
        end if;

        earlier_id := tasklib.submitted_before(
            submit.id, submit.idempotency_key, submit.name, submit.args, submit.kwargs);
        if earlier_id is not null then
            submit.existed := true;
            submit.id := earlier_id;
            return;
        end if;
    end loop;
    raise exception 'the task was not inserted, and no earlier task is in its way' using
        errcode = 'TL500',
        hint = 'Has tasklib.tasks a unique index, a trigger or a row security policy that is not tasklib''s?';
end
$$;
revoke all on function tasklib.submit(
    text, jsonb, jsonb, text, integer, double precision, timestamptz, timestamptz, integer, double precision, jsonb,
    text, boolean, text, uuid) from public;
