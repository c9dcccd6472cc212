-- Statements about tasks. Parameters are $1, $2 ...: a query can be pasted into psql as
-- `prepare name as ...`, and every one is prepared by a test.


-- One row of values for tasklib.submit. Only an earlier task comes back: a new one's id is known to who made it. Named
-- arguments, so that the order here is nobody's business. JSON comes as text: a driver that knows jsonb might encode it
-- once more.
-- name: submit
select id
from tasklib.submit(
    id => $1::uuid, name => $2::text, args => $3::text::jsonb, kwargs => $4::text::jsonb, queue => $5::text,
    priority => $6::integer, delay_seconds => $7::double precision, scheduled_at => $8::timestamptz,
    expires_at => $9::timestamptz, max_retries => $10::integer, timeout_seconds => $11::double precision,
    tags => $12::text::jsonb, idempotency_key => $13::text, store_result => $14::boolean, on_crash => $15::text)
where existed;


-- The same for a task that says nothing out of the ordinary: eleven parameters less to send, for most submits there are.
-- name: submit_plain
select id
from tasklib.submit(id => $1::uuid, name => $2::text, kwargs => $3::text::jsonb, queue => $4::text)
where existed;


-- name: submit_many
select ordinal, id
from tasklib.submit_many($1::text::jsonb)
where existed;


-- Columns in the order of tasklib.record.Task, here and in the lists below; a test compares them.
-- name: get
select id, name, state, scheduled_at, started_at, completed_at, created_at, args, kwargs, result, error,
       retry_count, max_retries, next_retry_at, worker_id, locked_until, timeout_seconds, priority, tags,
       queue, ready, attempt, fencing_token, claimed_at, expires_at, idempotency_key, payload_digest, serial_key,
       error_code, crash_count, suspect, store_result, on_crash, progress, trace_headers,
       resolved_at, resolved_by, resolution_note, parent_id, workflow_id, step_name, pending_parents,
       due_at, cancel_asked_at, strikes, (completed_by).worker_id as completed_by
from tasklib.tasks
where id = $1::uuid;


-- Those of them that are final, for who waits.
-- name: final
select id, name, state, scheduled_at, started_at, completed_at, created_at, args, kwargs, result, error,
       retry_count, max_retries, next_retry_at, worker_id, locked_until, timeout_seconds, priority, tags,
       queue, ready, attempt, fencing_token, claimed_at, expires_at, idempotency_key, payload_digest, serial_key,
       error_code, crash_count, suspect, store_result, on_crash, progress, trace_headers,
       resolved_at, resolved_by, resolution_note, parent_id, workflow_id, step_name, pending_parents,
       due_at, cancel_asked_at, strikes, (completed_by).worker_id as completed_by
from tasklib.tasks
where id = any($1::uuid[]) and completed_at is not null;


-- name: missing
select id from unnest($1::uuid[]) as given (id) where not exists (select from tasklib.tasks where tasks.id = given.id);


-- Until this session ends, whatever makes a task final tells of it: see the trigger tell_done.
-- name: say_that_somebody_waits
select pg_advisory_lock_shared(hashtextextended('tasklib.task_done', 0));


-- Newest first, by id: ids are time-ordered, and the primary key is the one index that is there
-- anyway. The page's start is a bound of the index scan also when there is none (a coalesce, not
-- an OR), so that page 1,000 costs as much as page 1. A rare name or tag is looked for through the
-- rows from the newest on; an index for each would be paid at every step of every task.
-- Two things keep it at that whatever the planner believes, which before the first ANALYZE was to
-- read and sort the whole table (0.9 s at a million rows, against 0.1 ms): the inner limit is a
-- literal, the most that may be asked for, since a parameter counts as a tenth of the table; and
-- the filters stand in one CASE, which counts as one half, while six guesses in a row come to
-- one row in a million.
-- name: list
select * from (
    select id, name, state, scheduled_at, started_at, completed_at, created_at, args, kwargs, result, error,
           retry_count, max_retries, next_retry_at, worker_id, locked_until, timeout_seconds, priority, tags,
           queue, ready, attempt, fencing_token, claimed_at, expires_at, idempotency_key, payload_digest, serial_key,
           error_code, crash_count, suspect, store_result, on_crash, progress, trace_headers,
           resolved_at, resolved_by, resolution_note, parent_id, workflow_id, step_name, pending_parents,
           due_at, cancel_asked_at, strikes, (completed_by).worker_id as completed_by
    from tasklib.tasks
    where id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      and case when ($2::text is null or state = $2::text)
           and ($3::text is null or name = $3::text)
           and ($4::text is null or queue = $4::text)
           and ($5::jsonb is null or tags @> $5::jsonb)
           and ($6::timestamptz is null or created_at >= $6::timestamptz)
           and ($7::timestamptz is null or created_at < $7::timestamptz) then true else false end
    order by id desc
    limit 10000
) as newest
limit $8::integer;


-- The same for the states that only unsuccessful tasks have. A CHECK gives each of those an error
-- code, so that the few rows of the partial index are all there is to read, among any number of
-- completed ones.
-- name: list_unsuccessful
select * from (
    select id, name, state, scheduled_at, started_at, completed_at, created_at, args, kwargs, result, error,
           retry_count, max_retries, next_retry_at, worker_id, locked_until, timeout_seconds, priority, tags,
           queue, ready, attempt, fencing_token, claimed_at, expires_at, idempotency_key, payload_digest, serial_key,
           error_code, crash_count, suspect, store_result, on_crash, progress, trace_headers,
           resolved_at, resolved_by, resolution_note, parent_id, workflow_id, step_name, pending_parents,
           due_at, cancel_asked_at, strikes, (completed_by).worker_id as completed_by
    from tasklib.tasks
    where error_code is not null
      and id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      and case when state = $2::text
           and ($3::text is null or name = $3::text)
           and ($4::text is null or queue = $4::text)
           and ($5::jsonb is null or tags @> $5::jsonb)
           and ($6::timestamptz is null or created_at >= $6::timestamptz)
           and ($7::timestamptz is null or created_at < $7::timestamptz) then true else false end
    order by id desc
    limit 10000
) as newest
limit $8::integer;


-- Takes the next tasks of one queue, in the order of the index: priority descending, then age, then id.
-- One queue a statement: `queue = any(...)` loses the index order. `id = any(array(...))` and not a join: joined to a
-- CTE, the planner preferred a hash join with a scan of the whole table (5.8k tasks/s against 23k). It comes back in no
-- order: the worker sorts. The claim itself is noted in the same statement, for the reaper and for the worker, should
-- the answer be lost. A worker that has other work takes no suspects ($4); a suspect at the head is taken alone, and
-- nothing behind it is even read.
-- Without statistics the planner would rather read and sort the whole backlog (20,000 pages for a hundred tasks at a
-- million rows, against 1,350): three guesses in a row come to a handful of rows, for which the order of the index seems
-- not worth its while. One CASE counts as one half, and a limit from a subselect as a tenth, in every kind of plan; the
-- limit around it is the most that is ever asked for.
-- A claim that comes back short is the last before its worker sleeps. So it says in the same round trip what a sleeper
-- has to know: when the next task is due, and which queues have tasks that the worker did not think of ($7: which it
-- did; null: there are no others for it). Then one row comes back also without a task. With a statement for each of
-- the three, a ring cost every daemon that heard it four queries, and half a millisecond before the first line.
-- $8 and $9 are a floor, a hint: nothing older, nothing of a lower priority. While another session holds a
-- snapshot, what was claimed stays in the index, and would be gone through again by every claim (a drain of 200,000
-- ended at three fifths of its speed). A bound on the third column is checked in the index, without a look at the rows.
-- What lies below the floor is found without it.
-- What the caller knows is not sent back, and times go as numbers: a date takes as long to read as six of those.
-- name: claim
with next as materialized (
    select id, suspect from (
        select id, suspect from tasklib.tasks
         where ready and queue = $2::text and priority >= coalesce($9::integer, -2147483648)
           and created_at >= coalesce(to_timestamp($8::double precision), '-infinity')
           and case when name = any($3::text[]) and (not suspect or $4::boolean)
                and (expires_at is null or expires_at > clock_timestamp()) then true else false end
         order by priority desc, created_at, id
         limit (select $5::integer)
         for update skip locked) as ready
    limit 1000
), taken as (
    update tasklib.tasks
       set state = 'claimed', ready = false, due_at = null, next_retry_at = null, worker_id = $1::text,
           fencing_token = fencing_token + 1,
           (claimed_at, locked_until) = (
               select now, now + $6::double precision * interval '1 second' from (values (clock_timestamp())) as clock (now))
     where id = any(case when (select suspect from next limit 1) then array(select id from next limit 1)
                         else array(select id from next where not suspect) end)
    returning id, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect, on_crash,
              timeout_seconds, expires_at, args::text as args, kwargs::text as kwargs, tags::text as tags, parent_id,
              store_result, id::text as id_text, priority, created_at, claimed_at, locked_until,
              date_part('epoch', claimed_at - greatest(created_at, scheduled_at)) as waited
), noted as (
    insert into tasklib.claims (worker_id, locked_until, task_ids)
    select $1::text, max(locked_until), array_agg(id) from taken having count(*) > 0
    returning id as claim_id
), known as (
    select case when (select suspect from next limit 1) then false
                else (select count(*) from next) < $5::integer end as is_short,
           case when (select suspect from next limit 1) then false
                else $4::boolean and exists (select from next where suspect) end as left_suspects
)
select id, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect, on_crash,
       timeout_seconds, expires_at, args, kwargs, tags, parent_id, store_result, id_text, waited,
       claim_id, date_part('epoch', claimed_at), date_part('epoch', clock_timestamp()), date_part('epoch', created_at),
       priority, is_short, left_suspects,
       case when is_short
            then (select date_part('epoch', min(due_at) - clock_timestamp()) from tasklib.tasks where due_at is not null)
       end as due_seconds,
       case when is_short and $7::text[] is not null then array(
           with recursive queues as (
               (select queue from tasklib.tasks where ready order by queue limit 1)
               union all
               select (select queue from tasklib.tasks where ready and queue > queues.queue order by queue limit 1)
               from queues where queues.queue is not null
           )
           select queue::text from queues where queue is not null and queue <> all($7::text[])) end as other_queues
from known left join (taken cross join noted) on true;


-- Every queue in which a task is ready: one probe of the index for each, however many tasks there are.
-- name: ready_queues
with recursive queues as (
    (select queue from tasklib.tasks where ready order by queue limit 1)
    union all
    select (select queue from tasklib.tasks where ready and queue > queues.queue order by queue limit 1)
    from queues where queues.queue is not null
)
select queue from queues where queue is not null;


-- Marks long runners, and what runs alone before its first line. The rest says when it started with its finish.
-- That a token lies between 1 and the largest is always true; it makes the planner expect one row, and look each up by
-- its key. A plan from when the table was small would go through the whole primary key instead. The same in `settle`.
-- name: start
update tasklib.tasks as task
   set state = 'running', started_at = given.started_at, attempt = attempt + 1
  from unnest($2::uuid[], $3::bigint[], $4::timestamptz[]) as given (id, fencing_token, started_at)
 where task.id = given.id and task.state = 'claimed' and task.worker_id = $1::text
   and task.fencing_token = given.fencing_token and given.fencing_token between 1 and 9223372036854775807
returning task.id;


-- How far running tasks are, as they said themselves.
-- name: note_progress
update tasklib.tasks as task
   set progress = given.progress::jsonb
  from unnest($2::uuid[], $3::bigint[], $4::text[]) as given (id, fencing_token, progress)
 where task.id = given.id and task.state in ('claimed', 'running') and task.worker_id = $1::text
   and task.fencing_token = given.fencing_token and given.fencing_token between 1 and 9223372036854775807;


-- Writes what followed from claims: finishes, gives back, recovers. One statement for a batch, with its attempts, the
-- end of its claims, and a ring for what may be claimed again. Every row is guarded by state, worker and token: what is
-- not in the answer belongs to somebody else by now.
-- One JSON value and not twenty arrays: cheaper to write and to read (see submit_many).
-- A waiting task says with due_at when its time comes; without, it is ready at once. What is left out stays as it is
-- (scheduled_at, started_at), or is cleared (result, error), unless the task waits without having failed. A task that
-- was asked to stop does not go on, also when its worker had not heard of it. The clock is read once: between two looks
-- a due time could pass, and the row would wait for nothing. The worker's own may be a little ahead: what is due at once
-- by that is ready.
-- name: settle
with given as (
    select *
      from jsonb_to_recordset($2::jsonb) as each (
        id uuid, token bigint, seen text, state text, began boolean, outcome text, due_at timestamptz,
        scheduled_at timestamptz, started_at timestamptz, finished_at timestamptz, result jsonb, error text,
        error_code text, error_message text, failed_reason text, is_retry boolean, is_crash boolean, is_strike boolean, suspect boolean,
        progress jsonb)
     where token between 1 and 9223372036854775807
), runner as (
    select row($1::text, hostname, process_name, pid)::tasklib.runner as runner
      from (values (0)) as one left join tasklib.workers on worker_id = $1::text
), settled as (
    update tasklib.tasks as task
       set (state, ready, due_at, next_retry_at, completed_at, result, error, error_code) = (
               select became.state,
                      became.waits and coalesce(given.due_at <= became.now, true),
                      case when became.waits
                           then least(case when given.due_at > became.now then given.due_at end, task.expires_at) end,
                      case when became.waits and became.state = 'failed' then given.due_at end,
                      case when not became.waits then given.finished_at end,
                      given.result,
                      case when became.stops then 'Cancelled: on request'
                           when given.state = 'pending' then task.error else given.error end,
                      case when became.stops then 'CANCELLED'
                           when given.state = 'pending' then task.error_code else given.error_code end
                 from (select goes_on and task.cancel_asked_at is not null as stops,
                              goes_on and task.cancel_asked_at is null as waits,
                              case when goes_on and task.cancel_asked_at is not null then 'cancelled'
                                   else given.state end as state,
                              greatest(clock_timestamp(), given.finished_at) as now
                         from (select given.state = 'pending' or given.state = 'failed' and given.due_at is not null)
                              as which (goes_on)) as became),
           scheduled_at = coalesce(given.scheduled_at, task.scheduled_at),
           started_at = coalesce(given.started_at, task.started_at),
           retry_count = task.retry_count + (coalesce(given.is_retry, false) and task.cancel_asked_at is null)::integer,
           crash_count = task.crash_count + coalesce(given.is_crash, false)::integer,
           strikes = task.strikes + coalesce(given.is_strike, false)::integer,
           attempt = task.attempt + (given.began and task.state = 'claimed')::integer,
           suspect = task.cancel_asked_at is null
               and coalesce(given.suspect, given.state = 'pending' and not given.began and task.suspect),
           progress = coalesce(given.progress, task.progress),
           completed_by = case when given.outcome = 'COMPLETED' then runner.runner end,
           cancel_asked_at = null, worker_id = null, claimed_at = null, locked_until = null
      from given, runner
     where task.id = given.id and task.fencing_token = given.token and task.worker_id = $1::text
       and task.state in ('claimed', 'running') and task.state = coalesce(given.seen, task.state)
    returning task.id, task.queue, task.attempt, task.fencing_token, task.started_at, task.ready, task.due_at,
              task.completed_at is null as goes_on, given.began, given.outcome, given.finished_at, given.error_code,
              given.error_message, given.failed_reason
), attempts as (
    insert into tasklib.attempts (
        task_id, fencing_token, started_at, finished_at, attempt, worker_pid, will_retry, outcome, worker_id,
        worker_hostname, worker_process_name, error_code, error_message, failed_reason)
    select settled.id, fencing_token, coalesce(settled.started_at, finished_at), finished_at, attempt, (runner).pid,
           goes_on, outcome, (runner).worker_id, (runner).hostname, (runner).process_name, error_code, error_message,
           failed_reason
      from settled, runner
     where began and outcome <> 'COMPLETED'
), unclaimed as (
    delete from tasklib.claims where worker_id = $1::text and id = any($3::bigint[])
)
select id, (select tasklib.ring_all(array_agg(queue)) from settled
             where ready or due_at < clock_timestamp() + interval '1 minute' having count(*) > 0)
  from settled;


-- The same for what simply succeeded, which is nearly everything: from arrays, and with nothing to decide. It takes three
-- fifths of the time of `settle`, and the same guard. It answers only if some were not settled: which ones were.
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
           attempt = task.attempt + (task.state = 'claimed')::integer, suspect = false,
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


-- Runs of this worker whose end is written: it may have been by a statement whose answer was lost.
-- name: written
select task_id, fencing_token from tasklib.task_attempts where task_id = any($2::uuid[]) and worker_id = $1::text;


-- Which of these rows nobody holds: a settlement that met a locked one goes on without it.
-- name: unlocked
select id from tasklib.tasks where id = any($1::uuid[]) for update skip locked;


-- name: promote
select promoted, next_due_seconds from tasklib.promote();


-- name: expire
select tasklib.expire();


-- name: cancel
select tasklib.cancel($1::uuid, $2::text);


-- name: retry
select tasklib.retry($1::uuid);


-- Names that wait at the head of their queues, for the warning about those that nobody serves.
-- name: waiting_names
select distinct waiting.name
from unnest($1::text[]) as given (queue),
     lateral (select name from tasklib.tasks where ready and tasks.queue = given.queue
               order by priority desc, created_at, id limit 200) as waiting
where waiting.name <> all($2::text[])
  and not exists (select from tasklib.workers
                   where died_at is null and lease_until > clock_timestamp() and waiting.name = any(task_names)
                     and (queues is null or given.queue = any(queues)));
