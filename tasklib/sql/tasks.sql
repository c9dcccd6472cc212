-- Statements about tasks. Parameters are $1, $2 ...: a query can be pasted into psql as
-- `prepare name as ...`, and every one is prepared by a test.


-- One row of values for tasklib.submit. Only an earlier task comes back: a new one's id is known to who made it. Named
-- arguments, so that the order here is nobody's business. JSON comes as text: a driver that knows jsonb might encode it
-- once more. So do times, which drivers that put values into the SQL write with a cast of their own.
-- These run on the connections of others, and so does `ready_queues`: every name has its schema. What is not named so is
-- looked for in their search_path, where others may have put a type, a function or an operator of that name.
-- What comes back is text: codecs of theirs for uuid and bigint might make anything of it, after the task was submitted.
-- name: submit
select id::pg_catalog.text
from tasklib.submit(
    id => $1::pg_catalog.uuid, name => $2::pg_catalog.text, args => $3::pg_catalog.text::pg_catalog.jsonb,
    kwargs => $4::pg_catalog.text::pg_catalog.jsonb, queue => $5::pg_catalog.text, priority => $6::integer,
    delay_seconds => $7::double precision, scheduled_at => $8::pg_catalog.text::pg_catalog.timestamptz,
    expires_at => $9::pg_catalog.text::pg_catalog.timestamptz, max_retries => $10::integer,
    timeout_seconds => coalesce($11::double precision, 'infinity'), tags => $12::pg_catalog.text::pg_catalog.jsonb,
    idempotency_key => $13::pg_catalog.text, store_result => $14::boolean, on_crash => $15::pg_catalog.text)
where existed;


-- The same for a task that says nothing out of the ordinary: eleven parameters less to send, for most submits there are.
-- The options are said all the same: what is left out would be looked up among the functions that workers have.
-- name: submit_plain
select id::pg_catalog.text
from tasklib.submit(
    id => $1::pg_catalog.uuid, name => $2::pg_catalog.text, kwargs => $3::pg_catalog.text::pg_catalog.jsonb,
    queue => $4::pg_catalog.text, priority => 0, max_retries => 3, timeout_seconds => 'infinity', store_result => true)
where existed;


-- name: submit_many
select ordinal::pg_catalog.text, id::pg_catalog.text
from tasklib.submit_many($1::pg_catalog.text::pg_catalog.jsonb)
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


-- Columns in the order of tasklib.record.Attempt.
-- name: attempts
select task_id, attempt, outcome, will_retry, started_at, finished_at, worker_id, worker_hostname, worker_process_name,
       worker_pid, error_code, error_message, failed_reason, error, fencing_token
from tasklib.task_attempts
where task_id = $1::uuid
order by attempt;


-- For the beginning of an id: a range of the primary key. The limit is a literal, for the planner: see `list`.
-- name: ids_between
select id from tasklib.tasks where id >= $1::uuid and id <= $2::uuid order by id limit 6;


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


-- How tasks stand that were waited for in vain, and whether a live worker would run them.
-- name: unfinished
select task.id, task.name, task.queue, task.state, case when not task.ready then task.due_at end,
       exists (select from tasklib.workers
                where died_at is null and not stopping and lease_until > clock_timestamp()
                  and task.name = any(task_names) and (queues is null or task.queue = any(queues)))
from tasklib.tasks as task
where task.id = any($1::uuid[]);


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
           and ($7::timestamptz is null or created_at < $7::timestamptz)
           and ($9::boolean is null or (completed_at is not null) = $9::boolean) then true else false end
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
           and ($7::timestamptz is null or created_at < $7::timestamptz)
           and ($9::boolean is null or (completed_at is not null) = $9::boolean) then true else false end
    order by id desc
    limit 10000
) as newest
limit $8::integer;


-- Takes the next tasks of one queue, in the order of the index: priority descending, then age, then id.
-- One queue a statement: `queue = any(...)` loses the index order. `id = any(array(...))` and not a join: joined to a
-- CTE, the planner preferred a hash join with a scan of the whole table (5.8k tasks/s against 23k). It comes back in no
-- order: the worker sorts. The claim itself is noted in the same statement, for the reaper and for the worker, should
-- the answer be lost. Suspects have a statement of their own, `claim_suspects`.
-- The names come as a subselect, which PostgreSQL hashes. Under a generic plan, `name = any($3)` compares each row with
-- each name: 800 ms for 5,000 names and 5,000 rows that the worker does not serve, against 5.
-- Without statistics the planner would rather read and sort the whole backlog (20,000 pages for a hundred tasks at a
-- million rows, against 1,350): three guesses in a row come to a handful of rows, for which the order of the index seems
-- not worth its while. One CASE counts as one half, and a limit from a subselect as a tenth, in every kind of plan; the
-- limit around it is the most that is ever asked for.
-- A claim that comes back short is the last before its worker sleeps. So it says in the same round trip what a sleeper
-- has to know: when the next task is due, whether a suspect waits, and whether other queues have tasks ($6: the ones
-- that the worker looks at by itself; null: it serves no others). It stops at the first such queue: to list 10,000
-- takes 30 ms. One row comes back also without a task. With a statement for each of these, a ring cost every daemon
-- that heard it four queries, and half a millisecond before the first line.
-- Arguments are bounded by bytes, so that no worker runs out of memory by a claim. What is stored in more than 64 kB
-- stays behind, and so do a task's arguments if they take more than its share of 16 MB: a claim of 1,000 tasks brings
-- 16 kB of each. The worker fetches the rest when it is about to start. To add up the sizes would read all rows
-- of the claim once more, a tenth of its time.
-- The CTE begins with the columns that `noted` reads: a row is taken apart as far as the last column that is needed.
-- $7 and $8 are a floor, a hint: nothing older, nothing of a lower priority. While another session holds a
-- snapshot, what was claimed stays in the index, and would be gone through again by every claim (a drain of 200,000
-- ended at three fifths of its speed). A bound on the third column is checked in the index, without a look at the rows.
-- What lies below the floor is found without it. $9 are rows that PostgreSQL refuses to change: the others go on.
-- What the caller knows is not sent back, and times go as numbers: a date takes as long to read as six of those.
-- name: claim
with next as materialized (
    select id from (
        select id from tasklib.tasks
         where ready and queue = $2::text and priority >= coalesce($8::integer, -2147483648)
           and created_at >= coalesce(to_timestamp($7::double precision), '-infinity')
           and case when name in (select unnest($3::text[])) and not suspect
                and (expires_at is null or expires_at > clock_timestamp()) and id <> all($9::uuid[])
                then true else false end
         order by priority desc, created_at, id
         limit (select $4::integer)
         for update skip locked) as ready
    limit 1000
), taken as (
    update tasklib.tasks
       set state = 'claimed', ready = false, due_at = null, next_retry_at = null, worker_id = $1::text,
           fencing_token = fencing_token + 1,
           (claimed_at, locked_until) = (
               select now, now + $5::double precision * interval '1 second' from (values (clock_timestamp())) as clock (now))
     where id = any(array(select id from next))
    returning id, locked_until, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect,
              on_crash, timeout_seconds, expires_at, tags::text as tags, parent_id, store_result, id::text as id_text,
              priority, created_at, claimed_at,
              date_part('epoch', claimed_at - greatest(created_at, scheduled_at)) as waited,
              case when pg_column_size(args) + pg_column_size(kwargs) <= 65536 then args::text end as args,
              case when pg_column_size(args) + pg_column_size(kwargs) <= 65536 then kwargs::text end as kwargs
), noted as (
    insert into tasklib.claims (worker_id, locked_until, task_ids)
    select $1::text, max(locked_until), array_agg(id) from taken having count(*) > 0
    returning id as claim_id
), known as (
    select count(*) < $4::integer as is_short, 16777216 / greatest(count(*), 1) as most_bytes from next
)
select id, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect, on_crash,
       timeout_seconds, expires_at,
       case when octet_length(args) + octet_length(kwargs) <= most_bytes then args end,
       case when octet_length(args) + octet_length(kwargs) <= most_bytes then kwargs end,
       tags, parent_id, store_result, id_text, waited,
       claim_id, date_part('epoch', claimed_at), date_part('epoch', clock_timestamp()), date_part('epoch', created_at),
       priority, is_short,
       case when is_short
            then (select true from tasklib.tasks where ready and suspect order by priority desc, created_at, id limit 1)
       end as has_suspects,
       case when is_short
            then (select date_part('epoch', min(due_at) - clock_timestamp()) from tasklib.tasks where due_at is not null)
       end as due_seconds,
       case when is_short and $6::text[] is not null then (
           with recursive queues as (
               (select queue from tasklib.tasks where ready order by queue limit 1)
               union all
               select (select queue from tasklib.tasks where ready and queue > queues.queue order by queue limit 1)
               from queues where queues.queue = any($6::text[])
           )
           select coalesce(bool_or(queue <> all($6::text[])), false) from queues) end as has_elsewhere
from known left join (taken cross join noted) on true;


-- Takes the next tasks of many queues in one statement, a few of each ($5), in the order of the queues' names, from the
-- one after $2 on. At most 200 queues that have a ready task are looked at; $7 are those that the worker serves (null:
-- all), $8 those that it looks at by itself, $9 rows that are set aside, as above. A statement for each of 10,000 queues made 10 tasks a second.
-- It answers the last queue that it looked at: null says that there are no more behind it.
-- name: claim_each
with recursive queues (queue, place) as (
    (select queue, 1 from tasklib.tasks where ready and queue > $2::text order by queue limit 1)
    union all
    select (select queue from tasklib.tasks where ready and queue > queues.queue order by queue limit 1), place + 1
    from queues where queues.queue is not null and place < 200
), next as materialized (
    select ready.id, queues.queue
      from queues
     cross join lateral (
        select id from tasklib.tasks
         where ready and tasks.queue = queues.queue
           and case when name in (select unnest($3::text[])) and not suspect
                and (expires_at is null or expires_at > clock_timestamp()) and id <> all($9::uuid[])
                then true else false end
         order by priority desc, created_at, id
         limit (select $5::integer)
         for update skip locked) as ready
     where queues.queue is not null and ($7::text[] is null or queues.queue = any($7::text[]))
       and queues.queue <> all($8::text[])
     order by place
     limit (select $4::integer)
), taken as (
    update tasklib.tasks
       set state = 'claimed', ready = false, due_at = null, next_retry_at = null, worker_id = $1::text,
           fencing_token = fencing_token + 1,
           (claimed_at, locked_until) = (
               select now, now + $6::double precision * interval '1 second' from (values (clock_timestamp())) as clock (now))
     where id = any(array(select id from next))
    returning id, locked_until, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect,
              on_crash, timeout_seconds, expires_at, tags::text as tags, parent_id, store_result, id::text as id_text,
              priority, created_at, claimed_at, queue,
              date_part('epoch', claimed_at - greatest(created_at, scheduled_at)) as waited,
              case when pg_column_size(args) + pg_column_size(kwargs) <= 65536 then args::text end as args,
              case when pg_column_size(args) + pg_column_size(kwargs) <= 65536 then kwargs::text end as kwargs
), noted as (
    insert into tasklib.claims (worker_id, locked_until, task_ids)
    select $1::text, max(locked_until), array_agg(id) from taken having count(*) > 0
    returning id as claim_id
), known as (
    select case when (select count(*) from next) < $4::integer then (select max(queue) from queues)
                else (select max(queue) from next) end as reached,
           (select count(*) from queues where queue is not null) < 200 and (select count(*) from next) < $4::integer
               as is_last,
           16777216 / greatest((select count(*) from next), 1) as most_bytes
)
select id, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect, on_crash,
       timeout_seconds, expires_at,
       case when octet_length(args) + octet_length(kwargs) <= most_bytes then args end,
       case when octet_length(args) + octet_length(kwargs) <= most_bytes then kwargs end,
       tags, parent_id, store_result, id_text, waited,
       claim_id, date_part('epoch', claimed_at), date_part('epoch', clock_timestamp()), date_part('epoch', created_at),
       priority, queue::text, case when not is_last then reached::text end as reached
from known left join (taken cross join noted) on true;


-- Takes suspects, of all queues that the worker serves ($2; null: all). They have a small index of their own: a busy
-- worker looks for them four times a second, and claims of other tasks, which begin at a floor, would pass them by.
-- Their arguments stay behind, as those of large tasks do: they are few.
-- name: claim_suspects
with taken as (
    update tasklib.tasks
       set state = 'claimed', ready = false, due_at = null, next_retry_at = null, worker_id = $1::text,
           fencing_token = fencing_token + 1,
           (claimed_at, locked_until) = (
               select now, now + $5::double precision * interval '1 second' from (values (clock_timestamp())) as clock (now))
     where id = any(array(
         select id from tasklib.tasks
          where ready and suspect and name in (select unnest($3::text[]))
            and ($2::text[] is null or queue = any($2::text[]))
            and (expires_at is null or expires_at > clock_timestamp()) and id <> all($6::uuid[])
          order by priority desc, created_at, id
          limit $4::integer
          for update skip locked))
    returning id, locked_until, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect,
              on_crash, timeout_seconds, expires_at, tags::text as tags, parent_id, store_result, id::text as id_text,
              priority, created_at, claimed_at, queue,
              date_part('epoch', claimed_at - greatest(created_at, scheduled_at)) as waited
), noted as (
    insert into tasklib.claims (worker_id, locked_until, task_ids)
    select $1::text, max(locked_until), array_agg(id) from taken having count(*) > 0
    returning id as claim_id
)
select id, name, fencing_token, attempt, retry_count, max_retries, crash_count, strikes, suspect, on_crash,
       timeout_seconds, expires_at, null::text, null::text, tags, parent_id, store_result, id_text, waited,
       claim_id, date_part('epoch', claimed_at), date_part('epoch', clock_timestamp()), date_part('epoch', created_at),
       priority, queue::text
from taken cross join noted;


-- The arguments that a claim left behind, for a task that its worker still holds.
-- name: arguments
select args::text, kwargs::text from tasklib.tasks
 where id = $2::uuid and worker_id = $1::text and fencing_token = $3::bigint;


-- What a claim of one task takes, by the same conditions: whose row it is that PostgreSQL refuses to change.
-- name: head
select id, name::text from tasklib.tasks
 where ready and ($1::text[] is null or queue = any($1::text[])) and name in (select unnest($2::text[]))
   and suspect = $3::boolean and (expires_at is null or expires_at > clock_timestamp()) and id <> all($4::uuid[])
 order by priority desc, created_at, id
 limit 1
 for update skip locked;


-- Every queue in which a task is ready: one probe of the index for each, however many tasks there are.
-- name: ready_queues
with recursive queues as (
    (select queue from tasklib.tasks where ready order by queue limit 1)
    union all
    select (select queue from tasklib.tasks where ready and queue operator(pg_catalog.>) queues.queue order by queue limit 1)
    from queues where queues.queue is not null
)
select queue from queues where queue is not null;


-- Marks long runners, and what runs alone before its first line. The rest says when it started with its finish.
-- A row that somebody has locked is passed over, and tried again later: finishes must not wait for it. It answers which
-- of the worker's tasks were marked, and which were not; what is not in the answer is somebody else's by now. By ctid, so
-- that each is looked up once; the lock is held, so that it is still the same.
-- A suspect with a process of its own ($5) is none while it runs: if the worker dies meanwhile, it was not alone there.
-- $6: its function says on_crash="fail", and whoever submitted it said nothing. From here on the row says it, for
-- whoever recovers the task without knowing the function.
-- That a token lies between 1 and the largest is always true; it makes the planner expect one row, and look each up by
-- its key. A plan from when the table was small would go through the whole primary key instead. The same in `settle`.
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


-- How far running tasks are, as they said themselves. Answers for which of them that is settled: it is written, or they
-- are no longer the worker's. A locked row is passed over, as in `start`.
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


-- Writes what followed from claims: finishes, gives back, recovers. One statement for a batch, with its attempts, the
-- end of its claims, and a ring for what may be claimed again. Every row is guarded by state, worker and token: what is
-- not in the answer belongs to somebody else by now.
-- One JSON value and not twenty arrays: cheaper to write and to read (see submit_many).
-- A waiting task says with due_at when its time comes; without, it is ready at once. What is left out stays as it is
-- (scheduled_at, started_at), or is cleared (result, error), unless the task waits without having failed. A task that
-- was asked to stop does not go on, also when its worker had not heard of it. The reason of that request is in `error`
-- already (see tasklib.cancel) and stays there; a CANCELLED attempt repeats it. The clock is read once: between two looks
-- a due time could pass, and the row would wait for nothing. The worker's own may be a little ahead: what is due at once
-- by that is ready. Counters end at their bound. An attempt whose number is taken, because somebody has changed the
-- counter by hand, is not written: that must not keep the task from being settled.
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
                      case when became.is_stopped and task.error_code = 'CANCELLED' then task.error
                           when became.is_stopped then 'Cancelled: on request'
                           when given.state = 'pending' then task.error else given.error end,
                      case when became.is_stopped then 'CANCELLED'
                           when given.state = 'pending' then task.error_code else given.error_code end
                 from (select task.cancel_asked_at is not null and (goes_on or given.state = 'cancelled') as is_stopped,
                              goes_on and task.cancel_asked_at is null as waits,
                              case when goes_on and task.cancel_asked_at is not null then 'cancelled'
                                   else given.state end as state,
                              greatest(clock_timestamp(), given.finished_at) as now
                         from (select given.state = 'pending' or given.state = 'failed' and given.due_at is not null)
                              as which (goes_on)) as became),
           scheduled_at = coalesce(given.scheduled_at, task.scheduled_at),
           started_at = coalesce(given.started_at, task.started_at),
           retry_count = task.retry_count + (coalesce(given.is_retry, false) and task.cancel_asked_at is null)::integer,
           crash_count = least(task.crash_count + coalesce(given.is_crash, false)::integer, 1000000000),
           strikes = least(task.strikes + coalesce(given.is_strike, false)::integer, 1000000000),
           attempt = least(task.attempt + (given.began and task.state = 'claimed')::integer, 1000000000),
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


-- Runs of this worker whose end is written: it may have been by a statement whose answer was lost.
-- name: written
select task_id, fencing_token from tasklib.task_attempts where task_id = any($2::uuid[]) and worker_id = $1::text;


-- Which of these rows nobody holds: a settlement that met a locked one goes on without it.
-- name: unlocked
select id from tasklib.tasks where id = any($1::uuid[]) for update skip locked;


-- name: promote
select promoted, next_due_seconds from tasklib.promote();


-- The same by key, for when PostgreSQL refuses to change one of them: whose turn it is ($1: whose it is not), and those
-- of some that still wait.
-- name: promotable
select id from tasklib.tasks
 where due_at <= (select clock_timestamp()) and not ready and pending_parents = 0
   and (expires_at is null or expires_at > clock_timestamp()) and id <> all($1::uuid[])
 order by due_at
 limit 1000;


-- name: promote_given
with due as (
    update tasklib.tasks
       set ready = true, due_at = expires_at
     where id = any(array(
         select id from tasklib.tasks
          where id = any($1::uuid[]) and due_at <= clock_timestamp() and not ready and pending_parents = 0
            and (expires_at is null or expires_at > clock_timestamp())
          for update skip locked))
    returning queue
)
select count(*), tasklib.ring_all(array_agg(distinct queue::text)) from due having count(*) > 0;


-- name: expire
select tasklib.expire();


-- As with `promotable`.
-- name: expirable
select id from tasklib.tasks
 where due_at <= (select clock_timestamp()) and expires_at <= clock_timestamp() and id <> all($1::uuid[])
 order by due_at
 limit 1000;


-- name: expire_given
with expired as (
    update tasklib.tasks
       set state = 'expired', ready = false, due_at = null, next_retry_at = null, completed_at = clock_timestamp(),
           error_code = 'EXPIRED', error = coalesce(error, 'Expired: not started before ' || expires_at)
     where id = any(array(
         select id from tasklib.tasks
          where id = any($1::uuid[]) and due_at <= clock_timestamp() and expires_at <= clock_timestamp()
          for update skip locked))
    returning 1
)
select count(*) from expired;


-- name: cancel
select tasklib.cancel($1::uuid, $2::text);


-- name: retry
select tasklib.retry($1::uuid);


-- Whether this role sees a task, in these queues or in any, that it could claim. What it may not lock, by a policy of
-- row-level security, is not there for it. Only one that has waited for longer than $2 seconds is locked, for a moment:
-- claims pass over what is locked, and whoever looks for a new task must not miss it.
-- name: has_lockable
with seen as materialized (
    select id, greatest(created_at, scheduled_at) < clock_timestamp() - $2::double precision * interval '1 second' as is_old
      from (
        select found.id, found.created_at, found.scheduled_at
          from (values (0)) as one,
               lateral (select id, created_at, scheduled_at from tasklib.tasks
                         where $1::text[] is null and ready limit 1) as found
        union all
        select found.id, found.created_at, found.scheduled_at
          from unnest($1::text[]) as given (queue),
               lateral (select id, created_at, scheduled_at from tasklib.tasks
                         where ready and tasks.queue = given.queue limit 1) as found) as found
), locked as (
    select from tasklib.tasks where id = any(array(select id from seen where is_old)) for update skip locked
)
select exists (select from seen where not is_old) or exists (select from locked);


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
