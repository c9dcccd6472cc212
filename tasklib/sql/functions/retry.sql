-- Runs a task again, now: a final task, whose retries begin anew, or one that waits for its next attempt. The answer is false
-- if there is no such task, or if it is pending or running. Attempts, token and crash count go on, because they are history.
-- The attempt that was kept in the task's own row becomes a row of `attempts`. Every retry is
-- written to task_transitions. A deadline or an expires_at that has passed is removed, or the task would end at once.
--
--     select tasklib.retry('0190a1b2-...');
create or replace function tasklib.retry(task_id uuid) returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    now constant timestamptz := clock_timestamp();
    before text;
    retried_queue text;
begin
    select state into before from tasklib.tasks where id = retry.task_id for update;
    insert into tasklib.attempts select * from tasklib.folded_attempts as folded where folded.task_id = retry.task_id;
    update tasklib.tasks
       set state = 'pending', ready = true, scheduled_at = now, completed_at = null, next_retry_at = null,
           expires_at = case when expires_at > now then expires_at end,
           deadline_at = case when deadline_at > now then deadline_at end,
           due_at = least(case when expires_at > now then expires_at end, case when deadline_at > now then deadline_at end),
           retry_count = case when completed_at is null then retry_count else 0 end,
           result = null, error = null, error_code = null, progress = null, suspect = false, strikes = 0, cancel_asked_at = null,
           resolved_at = null, resolved_by = null, resolution_note = null, completed_by = null
     where id = retry.task_id and (completed_at is not null or next_retry_at is not null)
    returning queue into retried_queue;
    if retried_queue is null then
        return false;
    end if;
    perform tasklib.note_transition(
        'retry', retry.task_id, retried_queue, jsonb_build_object('state', before), '{"state": "pending"}', null);
    perform tasklib.ring(retried_queue);
    return true;
end
$$;
