-- Statements about claims: which worker took which tasks.


-- What one worker holds, as the database sees it: for a worker that lost its connection, and perhaps an answer, or
-- whose database is another one since a failover, and lacks what was written last.
-- `offset 0` keeps the lookup by key where it is: joined, a plan from a small table went through all of the table.
-- name: held
select task.*, claim.id
from tasklib.claims as claim
cross join unnest(claim.task_ids) as taken (task_id)
cross join lateral (
    select id, name, queue, state, worker_id, fencing_token, attempt, retry_count, max_retries, crash_count,
           strikes, suspect, on_crash, timeout_seconds, claimed_at, started_at, expires_at, cancel_asked_at
      from tasklib.tasks
     where tasks.id = taken.task_id and tasks.worker_id = $1::text
    offset 0) as task
where claim.worker_id = $1::text;


-- For tasks that are still held when half of their lock has passed. A task that somebody else has locked holds up no
-- other: it is extended next time.
-- By ctid, so that each is looked up once; one that has just been changed has another by now, and is extended next time.
-- name: extend
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


-- Which of these have been asked to stop.
-- name: asked_to_stop
select id from tasklib.tasks where id = any($2::uuid[]) and worker_id = $1::text and cancel_asked_at is not null;


-- The next claims, in the order of their key, of workers that are dead or whose lock has passed. Paged by key ($1, $2),
-- so that claims which cannot be recovered now do not hide those behind them. A worker of which there is no row is dead
-- too: a failover may have lost it. It is given a lease's time ($3; $4: how long a claim is locked), in which it finds
-- that out itself, and stops.
-- name: abandoned
select claim.worker_id, claim.id,
       exists (select from tasklib.workers as worker
                where worker.worker_id = claim.worker_id and worker.died_at is null
                  and worker.lease_until > clock_timestamp()),
       clock_timestamp()
from tasklib.claims as claim
where (claim.worker_id, claim.id) > ($1::text, $2::bigint)
  and (claim.locked_until < clock_timestamp()
       or exists (select from tasklib.workers as worker
                   where worker.worker_id = claim.worker_id and worker.died_at is not null)
       or claim.locked_until + ($3::double precision - $4::double precision) * interval '1 second' < clock_timestamp()
          and not exists (select from tasklib.workers as worker where worker.worker_id = claim.worker_id))
order by claim.worker_id, claim.id
limit 100;


-- The tasks of one claim that its worker still holds, and that may be taken from it. A time that Python cannot read, an
-- infinite one for instance, would fail the whole answer: it is left out, and of the cancel it is enough that there was
-- one. The same in `held` of crashes.
-- name: abandoned_tasks
select task.id, name, queue, state, task.worker_id, fencing_token, attempt, retry_count, max_retries, crash_count,
       strikes, suspect, on_crash, timeout_seconds,
       case when claimed_at between '0001-01-02 00:00:00+00' and '9999-12-30 00:00:00+00' then claimed_at
            else clock_timestamp() end,
       case when started_at between '0001-01-02 00:00:00+00' and '9999-12-30 00:00:00+00' then started_at end,
       expires_at, case when cancel_asked_at is not null then clock_timestamp() end
from tasklib.tasks as task
where task.id = any(array(select unnest(task_ids) from tasklib.claims where worker_id = $1::text and id = $2::bigint))
  and task.worker_id = $1::text
  and (task.locked_until < clock_timestamp()
       or not exists (select from tasklib.workers where worker_id = $1::text and died_at is null))
order by task.id;


-- A claim goes when its worker holds none of its tasks any more.
-- name: forget
delete from tasklib.claims as claim
 where claim.worker_id = $1::text and claim.id = $2::bigint
   and not exists (
       select from tasklib.tasks as task where task.id = any(claim.task_ids) and task.worker_id = claim.worker_id);
