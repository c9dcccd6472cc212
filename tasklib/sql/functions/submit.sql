-- Submits one task, in the caller's transaction. `existed` is true if the idempotency key had already been used for the same
-- payload: then `id` is that of the first task.
--
--     select * from tasklib.submit('send_email', '{"to": "alice@example.com"}', delay_seconds => 60);
--
-- An option that is left out, or null, has the value of the task's function: see task_functions. If the function does not say it
-- either, priority, max_retries and timeout_seconds have the values of the queue: see queues. `timeout_seconds => 'infinity'` means
-- no timeout. on_crash may stay null: then the worker asks the function.
-- `resolved`: the submitter knows the function, and gives all that it says. `otherwise` holds options of the submitter's own
-- configuration, which count after those of the queue.
-- Fields of a record as values of the INSERT would take 9 us each.
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
    out existed boolean,
    deadline_at timestamptz default null,
    deadline_seconds double precision default null,
    resolved boolean default false,
    otherwise jsonb default null
)
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    submitted_at constant timestamptz := clock_timestamp();
    starts_at constant timestamptz := coalesce(
        submit.scheduled_at, submitted_at + submit.delay_seconds * interval '1 second');
    said record;
    last_priority integer := 0;  -- these three count after the queue's defaults
    last_retries integer := 3;
    last_timeout double precision;
    queue_priority integer;
    queue_retries integer;
    queue_timeout double precision;
    is_audited boolean;
    earlier_id uuid;
begin
    -- Nulls are refused here, and other values by the domains below: the table would refuse them too, but log the whole row.
    if num_nulls(submit.name, submit.kwargs, submit.args, submit.delay_seconds, submit.tags) > 0 then
        raise exception 'name, kwargs, args, delay_seconds and tags must not be null'
            using errcode = 'not_null_violation', hint = 'Leave out a parameter to get its default.';
    end if;
    if submit.otherwise is not null then
        last_retries := coalesce((submit.otherwise ->> 'max_retries')::integer, last_retries);
        last_timeout := (submit.otherwise ->> 'timeout_seconds')::double precision;
    end if;
    if not submit.resolved
       and num_nulls(submit.queue, submit.priority, submit.max_retries, submit.timeout_seconds, submit.store_result) > 0
    then
        select * into said from tasklib.task_functions as function where function.name = submit.name;
        submit.queue := coalesce(submit.queue, said.queue);
        submit.store_result := coalesce(submit.store_result, said.store_result);
        submit.on_crash := coalesce(submit.on_crash, nullif(said.on_crash, 'retry'));
        if submit.deadline_at is null then
            submit.deadline_seconds := coalesce(submit.deadline_seconds, said.deadline_seconds);
        end if;
        -- What the function leaves to its worker's configuration counts after the queue's default.
        last_priority := coalesce(said.priority, last_priority);
        last_retries := coalesce(said.max_retries, last_retries);
        last_timeout := coalesce(said.timeout_seconds, last_timeout);
        if coalesce('priority' = any(said.own), true) then
            submit.priority := coalesce(submit.priority, said.priority);
        end if;
        if coalesce('max_retries' = any(said.own), true) then
            submit.max_retries := coalesce(submit.max_retries, said.max_retries);
        end if;
        if coalesce('timeout_seconds' = any(said.own), true) then
            submit.timeout_seconds := coalesce(submit.timeout_seconds, said.timeout_seconds);
        end if;
    end if;
    if submit.deadline_seconds is not null then
        submit.deadline_at := least(
            submit.deadline_at, submitted_at + submit.deadline_seconds::tasklib.given_timeout * interval '1 second');
    end if;
    if submit.delay_seconds < 0 then
        raise exception 'delay_seconds must not be negative' using errcode = 'TL400';
    end if;
    if submit.delay_seconds <> 0 and submit.scheduled_at is not null then
        raise exception 'give delay_seconds or scheduled_at, not both' using errcode = 'TL400';
    end if;
    submit.id := coalesce(submit.id, tasklib.uuid7());
    submit.existed := false;
    submit.queue := coalesce(submit.queue, 'default');
    if pg_sequence_last_value('tasklib.submit_rules') is not null then
        select nullif(audit, false), default_priority, default_max_retries, default_timeout_seconds
          into is_audited, queue_priority, queue_retries, queue_timeout
          from tasklib.queues where queues.name = submit.queue;
        if not found then
            perform tasklib.refuse_unknown_queue(submit.queue);
        end if;
    end if;
    -- A second try is needed only if the earlier task was deleted in between. The tries are bounded, because a unique index
    -- or a trigger that is not ours may refuse the row in silence.
    for attempt in 1..10 loop
        insert into tasklib.tasks (
            id, name, args, kwargs, queue, priority, created_at, scheduled_at, ready, due_at, expires_at,
            max_retries, timeout_seconds, tags, idempotency_key, store_result, on_crash, deadline_at, audited)
        values (
            submit.id, submit.name, submit.args, submit.kwargs, submit.queue,
            coalesce(submit.priority, queue_priority, last_priority), submitted_at, starts_at, starts_at <= submitted_at,
            least(case when starts_at > submitted_at then starts_at end, submit.expires_at, submit.deadline_at),
            submit.expires_at, coalesce(submit.max_retries, queue_retries, last_retries)::tasklib.given_retries,
            nullif(coalesce(submit.timeout_seconds, queue_timeout, last_timeout), 'infinity')::tasklib.given_timeout,
            submit.tags, submit.idempotency_key, coalesce(submit.store_result, true),
            submit.on_crash::tasklib.given_crash_policy,
            submit.deadline_at::tasklib.moment, is_audited)
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
    text, boolean, text, uuid, timestamptz, double precision, boolean, jsonb) from public;

-- Takes the place of the function with fewer parameters, in the migration's transaction: whoever may execute that one may execute
-- this one. With both of them, a call would be ambiguous.
do $$
declare
    earlier constant regprocedure := to_regprocedure(
        'tasklib.submit(text, jsonb, jsonb, text, integer, double precision, timestamptz, timestamptz, integer,
                        double precision, jsonb, text, boolean, text, uuid)');
    given record;
begin
    if earlier is null then
        return;
    end if;
    for given in
        select acl.is_grantable,
               case when acl.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(acl.grantee)) end as grantee
          from pg_proc, aclexplode(proacl) as acl
         where pg_proc.oid = earlier and acl.grantee <> proowner
    loop
        execute format(
            'grant execute on function tasklib.submit(
                 text, jsonb, jsonb, text, integer, double precision, timestamptz, timestamptz, integer, double precision,
                 jsonb, text, boolean, text, uuid, timestamptz, double precision, boolean, jsonb) to %s%s',
            given.grantee, case when given.is_grantable then ' with grant option' else '' end);
    end loop;
    execute 'drop function ' || earlier;
end
$$;
