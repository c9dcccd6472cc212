-- Statements about tasks that no worker holds: submitting, reading, promoting, expiring, cancelling. Parameters are $1, $2 ..., so
-- that a query can be pasted into psql as `prepare name as ...`. A test prepares every one. `:task_columns` and the like are in
-- parts.sql.


-- Submits one task. A row comes back only if an earlier task has the same key or id: the caller knows the id of a new one.
-- Arguments are named, so that their order does not matter. JSON and times are sent as text. A driver that knows jsonb might
-- encode JSON a second time, and drivers that put values into the SQL add a cast of their own to times.
-- The three submits and `ready_queues` also run on connections of applications. So every name has its schema: a bare name would
-- be looked up in the application's search_path, where another role may have put a type, function or operator of that name.
-- The answer is text, because an application's own codecs for uuid and bigint might fail, after the task was submitted.
-- name: submit
select id::pg_catalog.text
from tasklib.submit(
    id => $1::pg_catalog.uuid, name => $2::pg_catalog.text, args => $3::pg_catalog.text::pg_catalog.jsonb,
    kwargs => $4::pg_catalog.text::pg_catalog.jsonb, queue => $5::pg_catalog.text, priority => $6::integer,
    delay_seconds => $7::double precision, scheduled_at => $8::pg_catalog.text::pg_catalog.timestamptz,
    expires_at => $9::pg_catalog.text::pg_catalog.timestamptz, max_retries => $10::integer,
    timeout_seconds => $11::double precision, tags => $12::pg_catalog.text::pg_catalog.jsonb,
    idempotency_key => $13::pg_catalog.text, store_result => $14::boolean, on_crash => $15::pg_catalog.text,
    deadline_at => $16::pg_catalog.text::pg_catalog.timestamptz, deadline_seconds => $17::double precision,
    otherwise => $18::pg_catalog.text::pg_catalog.jsonb, resolved => true)
where existed;


-- The same for a task without special options, which is nearly every task: fourteen parameters fewer to send. `resolved`, so that
-- the options are not looked up among the functions that workers have declared.
-- name: submit_plain
select id::pg_catalog.text
from tasklib.submit(
    id => $1::pg_catalog.uuid, name => $2::pg_catalog.text, kwargs => $3::pg_catalog.text::pg_catalog.jsonb,
    queue => $4::pg_catalog.text, resolved => true)
where existed;


-- Submits a batch, as one JSON array. Answers the position and the id of each task that existed before.
-- name: submit_many
select ordinal::pg_catalog.text, id::pg_catalog.text
from tasklib.submit_many($1::pg_catalog.text::pg_catalog.jsonb)
where existed;


-- One task.
-- name: get
select :task_columns
from tasklib.tasks
where id = $1::uuid;


-- The attempts of one task, with the columns in the order of tasklib.record.Attempt.
-- name: attempts
select task_id, attempt, outcome, will_retry, started_at, finished_at, worker_id, worker_hostname, worker_process_name,
       worker_pid, error_code, error_message, failed_reason, error, fencing_token
from tasklib.task_attempts
where task_id = $1::uuid
order by attempt;


-- The ids that begin alike, as a range of the primary key. The limit is a literal, for the planner: see `list`.
-- name: ids_between
select id from tasklib.tasks where id >= $1::uuid and id <= $2::uuid order by id limit 6;


-- Those of these tasks that are final, for clients that wait for them.
-- name: final
select :task_columns
from tasklib.tasks
where id = any($1::uuid[]) and completed_at is not null;


-- Those of these ids that no task has.
-- name: missing
select id from unnest($1::uuid[]) as given (id) where not exists (select from tasklib.tasks where tasks.id = given.id);


-- The state of tasks whose wait has timed out, and whether a live worker would run them.
-- name: unfinished
select task.id, task.name, task.queue, task.state, case when not task.ready then task.due_at end,
       exists (select from tasklib.workers
                where died_at is null and not stopping and lease_until > clock_timestamp()
                  and task.name = any(task_names) and (queues is null or task.queue = any(queues)))
from tasklib.tasks as task
where task.id = any($1::uuid[]);


-- Takes a lock that is held until the session ends. While it is held, each change that makes a task final sends a
-- notification: see the trigger tell_done.
-- name: announce_waiting
select pg_advisory_lock_shared(hashtextextended('tasklib.task_done', 0));


-- Lists tasks, the newest first. The order is that of the ids, which grow with time, so that the primary key is enough. The
-- start of the page bounds the index scan even if there is none (a coalesce and not an OR), so page 1,000 costs as much as page
-- 1. A rare name or tag is searched for through the rows, from the newest on: an index for each filter would be paid at every
-- step of every task.
-- Two details keep this plan whatever the statistics say. Before the first ANALYZE, the planner would otherwise read and sort
-- the whole table (0.9 s at a million rows, against 0.1 ms). The inner limit is a literal, the most that may be asked for,
-- because a parameter counts as a tenth of the table. And the filters stand in one CASE, which counts as one half, while six
-- guesses multiply to one row in a million.
-- name: list
select * from (
    select :task_columns
    from tasklib.tasks
    where id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      and case when ($2::text is null or state = $2::text)
           and ($3::text is null or name = $3::text)
           and ($4::text is null or queue = $4::text)
           and ($5::jsonb is null or tags @> $5::jsonb)
           and ($6::timestamptz is null or created_at >= $6::timestamptz)
           and ($7::timestamptz is null or created_at < $7::timestamptz)
           and ($9::boolean is null or (completed_at is not null) = $9::boolean) then true else false end
    order by id desc
    limit 10000
) as newest
limit $8::integer;


-- The same for the states that only unsuccessful tasks have. A CHECK gives each of those an error code, so that only the few
-- rows of a partial index are read, among any number of completed tasks.
-- name: list_unsuccessful
select * from (
    select :task_columns
    from tasklib.tasks
    where error_code is not null
      and id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      and case when state = $2::text
           and ($3::text is null or name = $3::text)
           and ($4::text is null or queue = $4::text)
           and ($5::jsonb is null or tags @> $5::jsonb)
           and ($6::timestamptz is null or created_at >= $6::timestamptz)
           and ($7::timestamptz is null or created_at < $7::timestamptz)
           and ($9::boolean is null or (completed_at is not null) = $9::boolean) then true else false end
    order by id desc
    limit 10000
) as newest
limit $8::integer;


-- Every queue in which a task is ready.
-- name: ready_queues
with recursive queues as (
    (select queue from tasklib.tasks where ready order by queue limit 1)
    :further_queues
)
select queue from queues where queue is not null;


-- Makes tasks ready whose time has come. Answers how many, and when the next one is due.
-- name: promote
select promoted, next_due_seconds from tasklib.promote();


-- The tasks that are due, without those that are set aside ($1). `promote_given` changes them by key. These two are used while
-- PostgreSQL refuses to change one of the rows, so that the others go on.
-- name: promotable
select id from tasklib.tasks
 where due_at <= (select clock_timestamp()) and not ready and pending_parents = 0
   and coalesce(least(expires_at, deadline_at) > clock_timestamp(), true) and id <> all($1::uuid[])
 order by due_at
 limit 1000;


-- Promotes those of these tasks that still wait.
-- name: promote_given
with due as (
    update tasklib.tasks
       set ready = true, due_at = least(expires_at, deadline_at)
     where id = any(array(
         select id from tasklib.tasks
          where id = any($1::uuid[]) and due_at <= clock_timestamp() and not ready and pending_parents = 0
            and coalesce(least(expires_at, deadline_at) > clock_timestamp(), true)
          for update skip locked))
    returning queue
)
select count(*), tasklib.ring_all(array_agg(distinct queue::text)) from due having count(*) > 0;


-- Ends tasks that were not started in time. Answers how many.
-- name: expire
select tasklib.expire();


-- The tasks that have expired, without those that are set aside ($1): see `promotable`.
-- name: expirable
select id from tasklib.tasks
 where due_at <= (select clock_timestamp()) and least(expires_at, deadline_at) <= clock_timestamp() and id <> all($1::uuid[])
 order by due_at
 limit 1000;


-- Expires those of these tasks that still wait.
-- name: expire_given
with expired as (
    update tasklib.tasks
       set (state, error_code, error) = (select * from tasklib.ended_late(expires_at, deadline_at, error)),
           ready = false, due_at = null, next_retry_at = null, completed_at = clock_timestamp()
     where id = any(array(
         select id from tasklib.tasks
          where id = any($1::uuid[]) and due_at <= clock_timestamp() and least(expires_at, deadline_at) <= clock_timestamp()
          for update skip locked))
    returning 1
)
select count(*) from expired;


-- Cancels a task that waits, or asks the worker that holds it to stop it.
-- name: cancel
select tasklib.cancel($1::uuid, $2::text);


-- Runs a final task again.
-- name: retry
select tasklib.retry($1::uuid);


-- Whether this role sees a task that it could claim, in these queues or in any; and the tasks that it has seen, one for each
-- queue. Row-level security hides rows that the role may not lock. A claim skips locked rows, so a worker that looks for a task
-- must not meet the lock of this statement. Therefore a task is locked, for a moment, only if it has waited for more than $2 seconds
-- and the last look saw it already ($3; null: this is the first look). A task that the last look did not see is no standstill.
-- Queues that are paused, or whose cap is in use, are passed over: that their tasks wait is meant, and somebody who has paused a
-- queue may well hold its rows. If all queues are served, the first open one is looked at, of at most 200 that have ready tasks.
-- name: lockable
with recursive queues as (
    (select queue from tasklib.tasks where ready and $1::text[] is null order by queue limit 1)
    :further_queues
), open_queues (queue) as (
    (select walked.queue
       from (select queues.queue::text from queues where queues.queue is not null limit 200) as walked (queue)
      where not exists (select from tasklib.queue_limits as limits where limits.queue in (walked.queue, '*') and :is_closed)
      limit 1)
    union all
    select given.queue
      from unnest($1::text[]) as given (queue)
     where not exists (select from tasklib.queue_limits as limits where limits.queue in (given.queue, '*') and :is_closed)
), seen as materialized (
    select found.id,
           greatest(found.created_at, found.scheduled_at)
               < clock_timestamp() - $2::double precision * interval '1 second' as is_old
      from open_queues,
           lateral (select id, created_at, scheduled_at from tasklib.tasks
                     where ready and tasks.queue = open_queues.queue limit 1) as found
), locked as (
    select from tasklib.tasks
     where id = any(array(select id from seen where is_old and id = any($3::uuid[])))
       for update skip locked
)
select exists (select from seen where not is_old or id <> all($3::uuid[]))
       or exists (select from locked),
       array(select id from seen);


-- Queues from which nothing is to be claimed now. '*' stands for all of them.
-- name: closed_queues
select limits.queue from tasklib.queue_limits as limits where :is_closed;


-- Names at the head of these queues ($1) that no live worker serves, without those that the caller serves itself ($2). A queue that
-- is paused needs no worker.
-- name: waiting_names
select distinct waiting.name
from (select queue from unnest($1::text[]) as given (queue)
       where queue not in (select limits.queue from tasklib.queue_limits as limits where limits.is_paused)) as given,
     lateral (select name from tasklib.tasks where ready and tasks.queue = given.queue
               order by priority desc, created_at, id limit 200) as waiting
where waiting.name <> all($2::text[])
  and not exists (select from tasklib.workers
                   where died_at is null and lease_until > clock_timestamp() and waiting.name = any(task_names)
                     and (queues is null or given.queue = any(queues)));
