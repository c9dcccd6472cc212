-- What must hold after any run that was drained, whatever was killed on the way: each query returns no rows.
--
-- Schema `chaos` is made by the driver after the run, from a journal that it kept outside the database:
-- chaos.submit has each task that was ever submitted, and how that went; chaos.run has each body that began, with the
-- time at which it ended or its process died, and whether its process was killed or frozen under it; chaos.live has the
-- pids of the worker processes that still run.
-- The run itself retries, resolves and deletes nothing by hand.


-- name: I1 no committed submit is lost
select submit.id
from chaos.submit
left join tasklib.tasks as task using (id)
where submit.outcome = 'ok' and task.id is null;


-- name: I2 every task is final
select id, name, state
from tasklib.tasks
where completed_at is null;


-- name: I3 nothing comes from nowhere
select task.id, submit.outcome
from tasklib.tasks as task
left join chaos.submit using (id)
where submit.id is null or submit.outcome = 'refused';


-- Attempts are 1 to n without a gap, the counters agree with them, and only failures and timeouts cost a retry. The
-- attempt that is running has no row yet.
-- name: I7 attempts are counted
select task.id, 'counters' as what
from tasklib.tasks as task
left join lateral (
    select count(*) as number, coalesce(max(attempt), 0) as last, coalesce(min(attempt), 1) as first,
           count(*) filter (where outcome in ('FAILED', 'TIMED_OUT') and will_retry) as retries,
           count(*) filter (where outcome in ('WORKER_FAILURE', 'LEASE_LOST')) as crashes
    from tasklib.task_attempts where task_id = task.id
) as attempts on true
where attempts.number <> attempts.last
   or attempts.first <> 1
   or attempts.last <> task.attempt - (task.state = 'running')::integer
   or task.retry_count > task.max_retries
   or task.retry_count <> attempts.retries
   or task.crash_count < attempts.crashes  -- a death while it was only claimed counts, and is no attempt
union all
select task_id, 'attempt without a task'
from tasklib.task_attempts
where task_id not in (select id from tasklib.tasks);


-- Tokens rise with the attempts and are never given out twice, also not to bodies that left no attempt.
-- name: I9 tokens rise
select earlier.task_id, 'attempts' as what
from tasklib.task_attempts as earlier
join tasklib.task_attempts as later using (task_id)
where later.attempt > earlier.attempt and later.fencing_token <= earlier.fencing_token
union all
select task_id, 'attempt above its task'
from tasklib.task_attempts as attempt
join tasklib.tasks as task on task.id = attempt.task_id
where attempt.fencing_token > task.fencing_token
union all
select task_id, 'bodies'
from chaos.run
group by task_id, token
having count(*) > 1
union all
select earlier.task_id, 'bodies out of order'
from chaos.run as earlier
join chaos.run as later using (task_id)
where later.began > earlier.began and later.token < earlier.token;


-- A task that is final stays so: no attempt follows a completed one, and no body begins. A second is allowed for what
-- lies between a worker's idea of the database's clock and the journal's.
-- name: I10 nothing follows the end
select earlier.task_id, 'attempt' as what
from tasklib.task_attempts as earlier
join tasklib.task_attempts as later using (task_id)
where later.attempt > earlier.attempt and (earlier.outcome = 'COMPLETED' or not earlier.will_retry)
union all
select task.id, 'body'
from tasklib.tasks as task
join chaos.run on run.task_id = task.id
where run.began > task.completed_at + interval '1 second';


-- Exactly one completed attempt for a completed task, none for another; and the body of that attempt has returned.
-- name: I11 completed once
select task.id, 'attempts' as what
from tasklib.tasks as task
left join tasklib.task_attempts as attempt on attempt.task_id = task.id and attempt.outcome = 'COMPLETED'
group by task.id
having count(attempt.task_id) <> (task.state = 'completed')::integer
union all
select attempt.task_id, 'body'
from tasklib.task_attempts as attempt
left join chaos.run on run.task_id = attempt.task_id and run.token = attempt.fencing_token and run.ended = 'returned'
where attempt.outcome = 'COMPLETED' and run.task_id is null;


-- A lease is whole or not there; and what is leased stands in a claim of its worker, or nobody would recover it.
-- name: I12 what is leased is noted
select id, 'lease columns' as what
from tasklib.tasks
where num_nonnulls(worker_id, claimed_at, locked_until) <> case when state in ('claimed', 'running') then 3 else 0 end
union all
select task.id, 'no claim'
from tasklib.tasks as task
where task.state in ('claimed', 'running')
  and not exists (select from tasklib.claims as claim
                   where claim.worker_id = task.worker_id and task.id = any(claim.task_ids));


-- name: I13 nothing is stuck or left over
select id::text, 'lock passed' as what
from tasklib.tasks
where state in ('claimed', 'running') and locked_until < clock_timestamp() - interval '30 seconds'
union all
select id::text, 'overdue'
from tasklib.tasks
where due_at < clock_timestamp() - interval '30 seconds'
union all
select format('%s/%s', worker_id, id), 'claim'
from tasklib.claims
union all
select worker_id, 'worker'
from tasklib.workers
where died_at is null and pid not in (select pid from chaos.live);


-- name: I19 one key is one task
select idempotency_key
from tasklib.tasks
where idempotency_key is not null
group by idempotency_key
having count(*) > 1
union all
select key
from chaos.submit
where outcome = 'ok' and key is not null
group by key
having count(distinct id) > 1;


-- Given up only with the retries used up, or when told not to retry; by a crash, or because its worker stopped under it,
-- only where the task asked for that.
-- By its deadline only if it had one, and no later than a retry's longest pause before it. Expired only after its time, buried only with a strike. And the last attempt knew that it was the last.
-- name: I21 given up only with a reason
select task.id, task.state, task.error_code
from tasklib.tasks as task
left join tasklib.task_attempts as last on last.task_id = task.id and last.attempt = task.attempt
where task.completed_at is not null
  and case task.state
      when 'failed' then
          task.error_code = 'DEADLINE_PASSED' and coalesce(task.deadline_at > task.completed_at + interval '1 hour', true)
          or task.error_code <> 'DEADLINE_PASSED' and (last.will_retry
          or last.attempt is null
          or task.retry_count < task.max_retries
             and task.error_code not in ('FAILED', 'INVALID_ARGUMENTS', 'UNKNOWN_TASK', 'UNSTORABLE')
             and not (task.on_crash is not distinct from 'fail' and last.outcome in ('WORKER_FAILURE', 'LEASE_LOST', 'INTERRUPTED'))
          or task.on_crash is distinct from 'fail' and last.outcome in ('WORKER_FAILURE', 'LEASE_LOST', 'INTERRUPTED'))
      when 'expired' then task.expires_at is null or task.completed_at < task.expires_at
      when 'buried' then task.strikes < 1
      when 'completed' then last.outcome is distinct from 'COMPLETED' or last.will_retry
      else false
  end;


-- A body that was hit before it was marked as running leaves no attempt; the journal knows.
-- name: I22 bodies overlap only after a recorded loss
select earlier.task_id, earlier.token, later.token
from chaos.run as earlier
join chaos.run as later on later.task_id = earlier.task_id and later.token > earlier.token
where later.began < coalesce(earlier.finished, 'infinity')
  and not earlier.was_hit
  and not exists (
      select from tasklib.task_attempts as attempt
       where attempt.task_id = earlier.task_id and attempt.fencing_token = earlier.token
         and attempt.outcome in ('WORKER_FAILURE', 'LEASE_LOST'));


-- The sessions of workers are told by their application_name; where no worker lives there must be none.
-- name: I23 no session, lock or transaction is leaked
select 'session' as what, pid::text as which
from pg_stat_activity
where datname = current_database() and application_name like 'tasklib:%' and not exists (select from chaos.live)
union all
select 'idle in transaction', pid::text
from pg_stat_activity
where datname = current_database() and state like 'idle in transaction%' and pid <> pg_backend_pid()
union all
select 'advisory lock', pid::text
from pg_locks
where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())
union all
select 'prepared transaction', gid
from pg_prepared_xacts
where database = current_database()
union all
select 'notification queue', pg_notification_queue_usage()::text
where pg_notification_queue_usage() > 0.01;


-- name: I24 tasks are conserved
select submitted.number as submitted, stored.number as stored
from (select count(*) as number from chaos.submit left join tasklib.tasks as task using (id)
       where submit.outcome = 'ok' or submit.outcome = 'unknown' and task.id is not null) as submitted,
     (select count(*) as number from tasklib.tasks) as stored
where submitted.number <> stored.number;
