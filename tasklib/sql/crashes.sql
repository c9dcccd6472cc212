-- Statements about a worker whose death was seen, and not merely guessed from its lease.


-- Ends the dead worker's backends, and says which are still there: what they have in flight may still be committed.
-- Only those that are ours: by the name that all connections of this configuration share ($2), and begun before the
-- death ($3 seconds ago), for the server gives the number of one that has gone to another.
-- name: terminate
select pid, pg_terminate_backend(pid)
  from pg_stat_activity
 where pid = any($1::integer[]) and datname = current_database() and starts_with(application_name, $2::text)
   and backend_start < clock_timestamp() - $3::double precision * interval '1 second';


-- What a worker holds, with all that a decision takes. `offset 0` as in `held` of claims.
-- name: held
select clock_timestamp(), task.*
from tasklib.claims as claim
cross join unnest(claim.task_ids) as taken (task_id)
cross join lateral (
    select id, name, queue, state, worker_id, fencing_token, attempt, retry_count, max_retries, crash_count, strikes,
           suspect, on_crash, timeout_seconds,
           case when claimed_at between '0001-01-02 00:00:00+00' and '9999-12-30 00:00:00+00' then claimed_at
                else clock_timestamp() end,
           case when started_at between '0001-01-02 00:00:00+00' and '9999-12-30 00:00:00+00' then started_at end,
           expires_at, case when cancel_asked_at is not null then clock_timestamp() end
      from tasklib.tasks
     where tasks.id = taken.task_id and tasks.worker_id = $1::text
    offset 0) as task
where claim.worker_id = $1::text
order by task.id;


-- Which of these tasks somebody holds, and was asked to stop; with the token of that run.
-- name: asked_to_stop
select id, fencing_token from tasklib.tasks
 where id = any($1::uuid[]) and cancel_asked_at is not null and state in ('claimed', 'running');


-- All claims of one worker of whose tasks it holds none any more.
-- name: forget_claims
delete from tasklib.claims as claim
 where claim.worker_id = $1::text
   and not exists (
       select from tasklib.tasks as task where task.id = any(claim.task_ids) and task.worker_id = $1::text);


-- Attempts of a worker that has died: it may have written some without having counted them.
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


-- From now on it cannot renew, and what it may still hold is the reaper's.
-- name: declare_dead
update tasklib.workers set died_at = clock_timestamp() where worker_id = $1::text and died_at is null
returning true;
