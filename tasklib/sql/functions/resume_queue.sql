-- Ends the pause of a queue. False: it was not paused.
--
--     select tasklib.resume_queue('mail');
create or replace function tasklib.resume_queue(name text, reason text default null, actor text default null) returns boolean
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    before tasklib.queues;
begin
    select * into before from tasklib.queues where name = resume_queue.name for update;
    if before.paused_at is null then
        return false;
    end if;
    update tasklib.queues set (paused_at, paused_by, pause_reason, paused_until) = (null, null, null, null)
     where name = resume_queue.name;
    perform tasklib.note_transition(
        'resume_queue', null, resume_queue.name,
        jsonb_build_object('paused_at', before.paused_at, 'paused_by', before.paused_by, 'pause_reason', before.pause_reason),
        null, resume_queue.reason, resume_queue.actor);
    return true;
end
$$;
revoke all on function tasklib.resume_queue(text, text, text) from public;
