-- Statements about executions: that a task runs, how far it is, and how it ended. Every write is guarded by the worker's id, the
-- token of its claim and the task's state. A row that does not match belongs to another worker by now, and is not in the answer.


-- Marks tasks as running: those that run for long, and before their first line those that must not run twice or run alone. All
-- others are `claimed` until they have ended, and their start is written with their end.
-- A locked row is skipped and tried again later, because finishes must not wait for it. So the answer says of each task that
-- the worker still holds whether it was marked. Rows are updated by ctid, so that each is looked up once; the row's lock keeps
-- its ctid as it is.
-- $5: the task has a process of its own. Then it is no suspect while it runs, because it would not be alone in the worker that
-- dies. $6: its function says on_crash="fail", and the submit said nothing. The row says it from now on, because a recovering
-- process does not know the function.
-- The condition on the token is always true. It makes the planner expect one row, and look up each task by its key; a plan from
-- when the table was small would read the whole primary key instead. The same holds in the statements below.
-- name: start
with given as materialized (
    select id, fencing_token, started_at, is_contained, fails_on_crash
      from unnest($2::uuid[], $3::bigint[], $4::timestamptz[], $5::boolean[], $6::boolean[])
        as each (id, fencing_token, started_at, is_contained, fails_on_crash)
     where fencing_token between 1 and 9223372036854775807
), free as materialized (
    select task.place, given.started_at, given.is_contained, given.fails_on_crash
      from given cross join lateral (
          select ctid as place from tasklib.tasks
           where tasks.id = given.id and tasks.state = 'claimed' and tasks.worker_id = $1::text
             and tasks.fencing_token = given.fencing_token
          for update skip locked) as task
), marked as (
    update tasklib.tasks as task
       set state = 'running', started_at = free.started_at, attempt = least(attempt + 1, 1000000000),
           suspect = suspect and not free.is_contained,
           on_crash = case when free.fails_on_crash then 'fail' else on_crash end
      from free where task.ctid = free.place
    returning task.id
)
select id, true from marked
union all
select task.id, false
  from given cross join lateral (
      select id from tasklib.tasks
       where tasks.id = given.id and tasks.state = 'claimed' and tasks.worker_id = $1::text
         and tasks.fencing_token = given.fencing_token
      offset 0) as task
 where (select count(*) from marked) < cardinality($2::uuid[]) and task.id <> all(array(select id from marked));


-- Writes the progress that running tasks have reported. Answers the tasks whose report is done with: it is written, or the task
-- is no longer the worker's. A locked row is skipped, as in `start`.
-- name: note_progress
with given as materialized (
    select id, fencing_token, progress
      from unnest($2::uuid[], $3::bigint[], $4::text[]) as each (id, fencing_token, progress)
     where fencing_token between 1 and 9223372036854775807
), free as materialized (
    select given.id, given.progress, task.place, task.is_ours
      from given cross join lateral (
          select ctid as place,
                 state in ('claimed', 'running') and worker_id = $1::text and fencing_token = given.fencing_token as is_ours
            from tasklib.tasks
           where tasks.id = given.id
          for update skip locked) as task
), noted as (
    update tasklib.tasks as task set progress = free.progress::jsonb from free where task.ctid = free.place and free.is_ours
)
select id from free;


-- Writes plain successes, which is nearly everything. It has the guard of `settle`, takes its values from arrays, has nothing to
-- decide, and needs three fifths of the time. A row comes back only if some tasks were not completed: the ids of the others.
-- name: complete
with given as (
    select id, token, to_timestamp(started) as started_at, to_timestamp(finished) as finished_at, result
      from unnest($2::uuid[], $3::bigint[], $4::double precision[], $5::double precision[], $6::text[])
        as each (id, token, started, finished, result)
    where token between 1 and 9223372036854775807
), settled as (
    update tasklib.tasks as task
       set state = 'completed', ready = false, due_at = null, next_retry_at = null, completed_at = given.finished_at,
           result = given.result::jsonb, error = null, error_code = null, started_at = given.started_at,
           attempt = least(task.attempt + (task.state = 'claimed')::integer, 1000000000), suspect = false,
           completed_by = (select row($1::text, hostname, process_name, pid)::tasklib.runner
                             from (values (0)) as one left join tasklib.workers on worker_id = $1::text),
           cancel_asked_at = null, worker_id = null, claimed_at = null, locked_until = null
      from given
     where task.id = given.id and task.fencing_token = given.token and task.worker_id = $1::text
       and task.state in ('claimed', 'running')
    returning task.id
), unclaimed as (
    delete from tasklib.claims where worker_id = $1::text and id = any($7::bigint[])
)
select array(select id from settled) where (select count(*) from settled) < cardinality($2::uuid[]);


-- Writes what becomes of tasks that a worker held, in one statement for a batch: with their attempts, the end of their claims,
-- and a ring for tasks that can be claimed again. The workers use it, and so do the duties that recover tasks of dead workers.
-- The values are one JSON array and not twenty SQL arrays, which is cheaper to write and to read (see submit_many).
--
-- `tasklib.outcomes` decides what becomes of a task; this statement only writes it. It refuses one thing: a task with a cancel
-- request is not written as one that goes on. The request may have come after the decision, and is seen only here, under the
-- row's lock. The row is then missing in the answer, and the writer decides once more (see tasklib.runtime.outcome_writer).
-- Until then the task is held. So its claim stays: a claim ends when none of the given tasks is held any more. `refused` finds
-- those that are. It is evaluated only if some were not settled, and after `settled`, whose rows a lock in the same statement
-- passes over. It locks, because the statement's snapshot may be older than a COMMIT that took the task away.
-- The reason of a cancel request is in `error` already (see tasklib.cancel). It stays there, and the CANCELLED attempt repeats
-- it.
--
-- A task that goes on is ready at `due_at`, or at once without one. scheduled_at and started_at stay as they are unless given.
-- result and error are cleared unless given, except that a task that goes on without having failed keeps its error.
-- The clock is read once: between two readings a due time could pass, and the task would wait for nothing. The worker's clock
-- may be a little ahead, and what is due at once by that clock is ready. Counters stop at their bound. An attempt whose number is
-- taken, because the counter was changed by hand, is not written: that must not keep the task from being settled.
-- name: settle
with given as (
    select *, state = 'pending' or state = 'failed' and due_at is not null as goes_on
      from jsonb_to_recordset($2::jsonb) as each (
        id uuid, token bigint, seen text, state text, began boolean, outcome text, due_at timestamptz,
        scheduled_at timestamptz, started_at timestamptz, finished_at timestamptz, result jsonb, error text,
        error_code text, error_message text, failed_reason text, is_retry boolean, is_crash boolean, is_strike boolean,
        suspect boolean, progress jsonb)
     where token between 1 and 9223372036854775807
), runner as (
    select row($1::text, hostname, process_name, pid)::tasklib.runner as runner
      from (values (0)) as one left join tasklib.workers on worker_id = $1::text
), settled as (
    update tasklib.tasks as task
       set state = given.state,
           (ready, due_at, next_retry_at, completed_at, result, error, error_code) = (
               select given.goes_on and coalesce(given.due_at <= now, true),
                      case when given.goes_on
                           then least(case when given.due_at > now then given.due_at end, task.expires_at, task.deadline_at) end,
                      case when given.goes_on and given.state = 'failed' then given.due_at end,
                      case when not given.goes_on then given.finished_at end,
                      given.result,
                      case when keeps_error then task.error else given.error end,
                      case when keeps_error then task.error_code else given.error_code end
                 from (select greatest(clock_timestamp(), given.finished_at) as now,
                              given.state = 'pending' or given.state = 'cancelled'
                                  and task.cancel_asked_at is not null and task.error_code = 'CANCELLED' as keeps_error)
                      as known),
           scheduled_at = coalesce(given.scheduled_at, task.scheduled_at),
           started_at = coalesce(given.started_at, task.started_at),
           retry_count = task.retry_count + coalesce(given.is_retry, false)::integer,
           crash_count = least(task.crash_count + coalesce(given.is_crash, false)::integer, 1000000000),
           strikes = least(task.strikes + coalesce(given.is_strike, false)::integer, 1000000000),
           attempt = least(task.attempt + (given.began and task.state = 'claimed')::integer, 1000000000),
           suspect = coalesce(given.suspect, given.state = 'pending' and not given.began and task.suspect),
           progress = coalesce(given.progress, task.progress),
           completed_by = case when given.outcome = 'COMPLETED' then runner.runner end,
           cancel_asked_at = null, worker_id = null, claimed_at = null, locked_until = null
      from given, runner
     where task.id = given.id and task.fencing_token = given.token and task.worker_id = $1::text
       and task.state in ('claimed', 'running') and task.state = coalesce(given.seen, task.state)
       and (task.cancel_asked_at is null or not given.goes_on)
    returning task.id, task.queue, task.attempt, task.fencing_token, task.started_at, task.ready, task.due_at, given.goes_on,
              given.began, given.outcome, given.finished_at, given.error_code,
              case when given.outcome = 'CANCELLED' and task.error <> given.error
                   then substr(task.error, length('Cancelled: ') + 1) else given.error_message end as error_message,
              given.failed_reason, case when given.outcome = 'CANCELLED' then task.error else given.error end as error
), attempts as (
    insert into tasklib.attempts (
        task_id, fencing_token, started_at, finished_at, attempt, worker_pid, will_retry, outcome, worker_id,
        worker_hostname, worker_process_name, error_code, error_message, failed_reason, error)
    select settled.id, fencing_token, coalesce(settled.started_at, finished_at), finished_at, attempt, (runner).pid,
           goes_on, outcome, (runner).worker_id, (runner).hostname, (runner).process_name, error_code, error_message,
           failed_reason, error
      from settled, runner
     where began and outcome <> 'COMPLETED'
    on conflict do nothing
), refused as materialized (
    select task.id
      from given cross join lateral (
          select id from tasklib.tasks
           where tasks.id = given.id and tasks.fencing_token = given.token and tasks.worker_id = $1::text
             and tasks.state in ('claimed', 'running')
          for update) as task
), unclaimed as (
    delete from tasklib.claims
     where worker_id = $1::text and id = any($3::bigint[])
       and case when (select count(*) from settled) < jsonb_array_length($2::jsonb)
                then not exists (select from refused) else true end
)
select id, (select tasklib.ring_all(array_agg(queue)) from settled
             where ready or due_at < clock_timestamp() + interval '1 minute' having count(*) > 0)
  from settled;


-- The executions of this worker whose end is written. After a lost connection, a statement may have been executed although its
-- answer never came.
-- name: written
select task_id, fencing_token from tasklib.task_attempts where task_id = any($2::uuid[]) and worker_id = $1::text;


-- Those of these tasks whose rows no other session has locked. A settlement that met a locked row goes on without it.
-- name: unlocked
select id from tasklib.tasks where id = any($1::uuid[]) for update skip locked;
