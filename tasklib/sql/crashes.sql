-- Statements about a worker whose death its supervisor has seen. The reaper only infers a death from the lease.


-- Ends the server processes of a dead worker's connections, and answers which are still there: a statement that they execute may
-- still be committed. The server gives the number of an ended process to a new one. So only processes with the name that all
-- connections of this configuration share ($2), which began before the death ($3 seconds ago), are ended.
-- name: terminate
select pid, pg_terminate_backend(pid)
  from pg_stat_activity
 where pid = any($1::integer[]) and datname = current_database() and starts_with(application_name, $2::text)
   and backend_start < clock_timestamp() - $3::double precision * interval '1 second';


-- Those of these tasks that are held and have a cancel request, each with the token of that run.
-- name: asked_to_stop
select id, fencing_token from tasklib.tasks
 where id = any($1::uuid[]) and cancel_asked_at is not null and state in ('claimed', 'running');


-- Deletes the claims of one worker that holds none of their tasks any more.
-- name: forget_claims
delete from tasklib.claims as claim
 where claim.worker_id = $1::text
   and not exists (
       select from tasklib.tasks as task where task.id = any(claim.task_ids) and task.worker_id = $1::text);


-- Attempts of a worker that has died. It may have written some that it did not live to count.
-- name: written
select attempt.task_id, attempt.fencing_token, task.name, task.queue, attempt.outcome, attempt.will_retry,
       case when isfinite(attempt.started_at) and isfinite(attempt.finished_at)
            then extract(epoch from attempt.finished_at - attempt.started_at)::double precision else 0 end,
       attempt.failed_reason, task.state = 'buried' and task.fencing_token = attempt.fencing_token
from tasklib.task_attempts as attempt
cross join lateral (
    select name, queue, state, fencing_token from tasklib.tasks where id = attempt.task_id offset 0
) as task
where attempt.task_id = any($1::uuid[]) and attempt.worker_id = $2::text;


-- Declares one worker dead. It can no longer renew its lease, and the reaper recovers whatever it still holds.
-- name: declare_dead
update tasklib.workers set died_at = clock_timestamp() where worker_id = $1::text and died_at is null
returning true;
