-- What workers sent when the schema was at 0007: tests/integration/test_earlier_versions.py sends it to the schema of today.

-- name: tasks_claim
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

-- name: tasks_ready_queues
with recursive queues as (
    (select queue from tasklib.tasks where ready order by queue limit 1)
    union all
    select (select queue from tasklib.tasks where ready and queue > queues.queue order by queue limit 1)
    from queues where queues.queue is not null
)
select queue from queues where queue is not null;

-- name: tasks_start
update tasklib.tasks as task
   set state = 'running', started_at = given.started_at, attempt = attempt + 1
  from unnest($2::uuid[], $3::bigint[], $4::timestamptz[]) as given (id, fencing_token, started_at)
 where task.id = given.id and task.state = 'claimed' and task.worker_id = $1::text
   and task.fencing_token = given.fencing_token and given.fencing_token between 1 and 9223372036854775807
returning task.id;

-- name: tasks_note_progress
update tasklib.tasks as task
   set progress = given.progress::jsonb
  from unnest($2::uuid[], $3::bigint[], $4::text[]) as given (id, fencing_token, progress)
 where task.id = given.id and task.state in ('claimed', 'running') and task.worker_id = $1::text
   and task.fencing_token = given.fencing_token and given.fencing_token between 1 and 9223372036854775807;

-- name: tasks_settle
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

-- name: tasks_complete
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

-- name: tasks_written
select task_id, fencing_token from tasklib.task_attempts where task_id = any($2::uuid[]) and worker_id = $1::text;

-- name: tasks_unlocked
select id from tasklib.tasks where id = any($1::uuid[]) for update skip locked;

-- name: tasks_promote
select promoted, next_due_seconds from tasklib.promote();

-- name: tasks_expire
select tasklib.expire();

-- name: tasks_cancel
select tasklib.cancel($1::uuid, $2::text);

-- name: tasks_retry
select tasklib.retry($1::uuid);

-- name: tasks_waiting_names
select distinct waiting.name
from unnest($1::text[]) as given (queue),
     lateral (select name from tasklib.tasks where ready and tasks.queue = given.queue
               order by priority desc, created_at, id limit 200) as waiting
where waiting.name <> all($2::text[])
  and not exists (select from tasklib.workers
                   where died_at is null and lease_until > clock_timestamp() and waiting.name = any(task_names)
                     and (queues is null or given.queue = any(queues)));

-- name: claims_held
select claim.id, task.id, task.fencing_token, task.cancel_asked_at is not null
from tasklib.claims as claim
cross join unnest(claim.task_ids) as taken (task_id)
cross join lateral (
    select id, fencing_token, cancel_asked_at from tasklib.tasks
     where tasks.id = taken.task_id and tasks.worker_id = $1::text
    offset 0) as task
where claim.worker_id = $1::text;

-- name: claims_extend
with extended as (
    update tasklib.tasks
       set locked_until = clock_timestamp() + $3::double precision * interval '1 second'
     where ctid = any(array(
         select ctid from tasklib.tasks
          where id = any($2::uuid[]) and worker_id = $1::text and state in ('claimed', 'running')
          for update skip locked))
    returning id, locked_until
), noted as (
    update tasklib.claims
       set locked_until = clock_timestamp() + $3::double precision * interval '1 second'
     where worker_id = $1::text and task_ids && $2::uuid[]
)
select id from extended;

-- name: claims_asked_to_stop
select id from tasklib.tasks where id = any($2::uuid[]) and worker_id = $1::text and cancel_asked_at is not null;

-- name: claims_abandoned
select claim.worker_id, claim.id,
       exists (select from tasklib.workers as worker
                where worker.worker_id = claim.worker_id and worker.died_at is null
                  and worker.lease_until > clock_timestamp()),
       clock_timestamp()
from tasklib.claims as claim
where (claim.worker_id, claim.id) > ($1::text, $2::bigint)
  and (claim.locked_until < clock_timestamp()
       or exists (select from tasklib.workers as worker
                   where worker.worker_id = claim.worker_id and worker.died_at is not null))
order by claim.worker_id, claim.id
limit 100;

-- name: claims_abandoned_tasks
select task.id, name, queue, state, task.worker_id, fencing_token, attempt, retry_count, max_retries, crash_count,
       strikes, suspect, on_crash, timeout_seconds, claimed_at, started_at, expires_at, cancel_asked_at
from tasklib.tasks as task
where task.id = any(array(select unnest(task_ids) from tasklib.claims where worker_id = $1::text and id = $2::bigint))
  and task.worker_id = $1::text
  and (task.locked_until < clock_timestamp()
       or exists (select from tasklib.workers where worker_id = $1::text and died_at is not null))
order by task.id;

-- name: claims_forget
delete from tasklib.claims as claim
 where claim.worker_id = $1::text and claim.id = $2::bigint
   and not exists (
       select from tasklib.tasks as task where task.id = any(claim.task_ids) and task.worker_id = claim.worker_id);

-- name: workers_register
insert into tasklib.workers (worker_id, name, hostname, pid, process_name, queues, task_names, concurrency, lease_until)
values ($1::text, $2::text, $3::text, $4::integer, $5::text, $6::text[], $7::text[], $8::integer,
        clock_timestamp() + $9::double precision * interval '1 second')
on conflict (worker_id) do update
    set renewed_at = clock_timestamp(), lease_until = excluded.lease_until
    where workers.died_at is null
returning clock_timestamp();

-- name: workers_renew
update tasklib.workers
   set renewed_at = clock_timestamp(), lease_until = clock_timestamp() + $2::double precision * interval '1 second',
       task_names = $3::text[], stopping = $4::boolean
 where worker_id = $1::text and died_at is null
returning clock_timestamp();

-- name: workers_renew_for
update tasklib.workers
   set renewed_at = clock_timestamp(), lease_until = clock_timestamp() + $2::double precision * interval '1 second'
 where worker_id = any($1::text[]) and died_at is null
   and lease_until < clock_timestamp() + $2::double precision / 2 * interval '1 second'
returning worker_id;

-- name: workers_deregister
delete from tasklib.workers
 where worker_id = $1::text and not exists (select from tasklib.claims where claims.worker_id = $1::text);

-- name: workers_declare_dead
update tasklib.workers
   set died_at = clock_timestamp()
 where died_at is null and lease_until < clock_timestamp()
   and pg_postmaster_start_time() < clock_timestamp() - $1::double precision * interval '1 second'
returning worker_id, name, hostname, pid;

-- name: workers_forget_dead
delete from tasklib.workers as worker
 where died_at < clock_timestamp() - $1::double precision * interval '1 second'
   and not exists (select from tasklib.claims where claims.worker_id = worker.worker_id);
