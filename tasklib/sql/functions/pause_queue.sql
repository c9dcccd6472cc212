-- Pauses a queue in the whole cluster: within a second no worker starts a task of it. Tasks that execute go on. `until` ends the
-- pause by itself. A queue that is paused already gets the new author, reason and end.
--
--     select tasklib.pause_queue('mail', 'the provider is down', now() + interval '1 hour');
create or replace function tasklib.pause_queue(
    name text, reason text default null, until timestamptz default null, actor text default null
)
    returns tasklib.queues
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    paused tasklib.queues;
begin
    pause_queue.until := nullif(pause_queue.until, 'infinity');
    if pause_queue.until <= clock_timestamp() then
        raise exception 'the pause would end in the past: %', pause_queue.until using errcode = 'TL400';
    end if;
    insert into tasklib.queues as queue (name, paused_at, paused_by, pause_reason, paused_until)
    values (pause_queue.name, clock_timestamp(), coalesce(pause_queue.actor, tasklib.caller()), pause_queue.reason,
            pause_queue.until)
    on conflict (name) do update
       set (paused_at, paused_by, pause_reason, paused_until)
         = (case when queue.paused_until <= excluded.paused_at then excluded.paused_at  -- the earlier pause is over
                 else coalesce(queue.paused_at, excluded.paused_at) end,
            excluded.paused_by, excluded.pause_reason, excluded.paused_until)
    returning * into paused;
    perform tasklib.note_transition(
        'pause_queue', null, pause_queue.name, null, jsonb_build_object('paused_until', pause_queue.until),
        pause_queue.reason, pause_queue.actor);
    return paused;
end
$$;
revoke all on function tasklib.pause_queue(text, text, timestamptz, text) from public;

-- A task may pause its queue by raising PauseQueue. So every role that works as a worker may call it.
do $$
declare
    worker record;
begin
    for worker in
        select quote_ident(pg_get_userbyid(acl.grantee)) as name
          from pg_class, aclexplode(relacl) as acl
         where pg_class.oid = 'tasklib.workers'::regclass and acl.grantee not in (0, relowner)
           and acl.privilege_type = 'INSERT'
    loop
        execute format(
            'grant execute on function tasklib.pause_queue(text, text, timestamptz, text) to %s', worker.name);
    end loop;
end
$$;
