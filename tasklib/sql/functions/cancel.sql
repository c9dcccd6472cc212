-- Cancels a task. The answer is 'cancelled' if the task was waiting: it will not run. The answer is 'asked' if a worker holds
-- the task: the worker is asked to stop it, and the task is cancelled when it has stopped. The answer is null if there is no
-- such task, or if it is final already.
-- The reason is stored in `error` at once, also while the task is still running; `settle` keeps it there. A second cancel
-- without a reason keeps the reason of the first. Every cancel is written to task_transitions.
--
--     select tasklib.cancel('0190a1b2-...', 'ordered twice');
create or replace function tasklib.cancel(task_id uuid, reason text default null) returns text
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    before text;
    after text;
    cancelled_queue text;
begin
    select state into before from tasklib.tasks where id = cancel.task_id and completed_at is null for update;
    if before is null then
        return null;
    end if;
    update tasklib.tasks
       set state = case when state in ('claimed', 'running') then state else 'cancelled' end,
           cancel_asked_at = case when state in ('claimed', 'running') then clock_timestamp() end,
           ready = false,
           due_at = null,
           next_retry_at = null,
           completed_at = case when state in ('claimed', 'running') then null else clock_timestamp() end,
           error_code = 'CANCELLED',
           error = case when reason <> '' then 'Cancelled: ' || reason
                        when cancel_asked_at is not null and error_code = 'CANCELLED' then error
                        else 'Cancelled: on request' end
     where id = task_id
    returning state, queue into after, cancelled_queue;
    perform tasklib.note_transition(
        'cancel', task_id, cancelled_queue, jsonb_build_object('state', before), jsonb_build_object('state', after), reason);
    if after = 'cancelled' then
        return after;
    end if;
    perform pg_notify('task_cancel', task_id::text);
    return 'asked';
end
$$;
