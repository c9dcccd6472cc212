-- Statements about claims: taking tasks, and what a worker has taken. A row of `claims` lists the tasks of one claim, so that
-- the duties that recover them need not search the table of tasks.


-- Takes the next tasks of one queue, in the order of the index: priority descending, then age, then id.
--
-- Why it has this shape:
-- - One queue per statement, because `queue = any(...)` loses the order of the index.
-- - `id = any(array(...))` and no join. Joined to a CTE, the planner preferred a hash join with a scan of the whole table
--   (5.8k tasks/s against 23k). The rows come back unordered, and the worker sorts them.
-- - The claim itself is noted in the same statement. The reaper needs it, and so does a worker that has lost the answer.
-- - The names come as a subselect, which PostgreSQL hashes. Under a generic plan, `name = any($3)` compares each row with each
--   name: 800 ms for 5,000 names and 5,000 rows that the worker does not serve, against 5 ms.
-- - The conditions stand in one CASE, and the limit comes from a subselect. Without statistics, the planner would multiply
--   three guesses, expect a handful of rows, and read and sort the whole backlog (20,000 pages for a hundred tasks at a million
--   rows, against 1,350). One CASE counts as one half, and such a limit as a tenth, in every kind of plan. The literal limit
--   around it is the most that is ever asked for.
-- - Arguments are bounded, so that no claim fills a worker's memory: a claim brings at most 16 MB, shared equally among its
--   tasks. The worker fetches the rest when it is about to start the task. To add up the real sizes would read all rows of the
--   claim once more, a tenth of its time.
-- - Suspects have a statement of their own, `claim_suspects`.
--
-- $7 and $8 are a floor: nothing submitted before this time, nothing of a lower priority. While another session holds a
-- snapshot, claimed rows stay in the index, and every claim would go through them again (a drain of 200,000 tasks ended at three
-- fifths of its speed). A bound on the third column is checked in the index, without a look at the rows. The worker finds tasks
-- below the floor by a claim without one. $9 are rows that PostgreSQL refuses to change: the claim goes on without them.
--
-- A short claim is the last before its worker sleeps. So it also answers what a sleeping worker has to know: when the next task
-- is due, whether a suspect waits, the version of the policies, and whether other queues have tasks ($6: the queues that the worker
-- looks at by itself; null: it serves no others). That saves every worker that was woken three more queries, half a millisecond before the first line of
-- a task. The search for other queues stops at the first one, because to list 10,000 takes 30 ms. One row comes back even if no
-- task was taken.
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
), :take_next;


-- Takes the next tasks of a queue whose tasks age: each full $7 seconds of waiting count as one step of priority. Of equal ones, the
-- task with the higher priority of its own comes first, then the older one.
--
-- The index is used as it is. Each priority that has a ready task is cut into slices by age, which are ranges of created_at, and the
-- slices are visited in the order of priority plus steps, until there are enough tasks. Both bounds of a slice are plain comparisons:
-- with an `or` in one of them, a claim took 20 times as long. What is older than 1,000 steps counts as 1,000 steps old. A stored
-- rank would be free here, and would have to be rewritten whenever the policy changes.
-- $8: rows that are set aside, as in `claim`. There is no floor, because the order changes with time.
-- name: claim_aged
with recursive now as materialized (
    select clock_timestamp() as now
), levels as (
    (select priority from tasklib.tasks where ready and queue = $2::text order by priority desc limit 1)
    union all
    select (select priority from tasklib.tasks
             where ready and queue = $2::text and priority < levels.priority order by priority desc limit 1)
      from levels where levels.priority is not null
), oldest as materialized (
    select priority, (select created_at from tasklib.tasks
                       where ready and queue = $2::text and tasks.priority = levels.priority
                       order by created_at, id limit 1) as created_at
      from levels where priority is not null
), slices as materialized (
    select priority, priority::bigint + step as effective,
           case when step < most then now - (step + 1) * $7::double precision * interval '1 second' else '-infinity' end as after,
           now - step * $7::double precision * interval '1 second' as until
      from (select priority, now, least(floor(greatest(extract(epoch from now - created_at), 0) / $7::double precision), 1000)::integer
                   as most
              from oldest, now) as level, generate_series(0, most) as step
     order by effective desc, priority desc
), next as materialized (
    select ready.id
      from slices cross join lateral (
          select id from tasklib.tasks
           where ready and queue = $2::text and priority = slices.priority
             and created_at > slices.after and created_at <= slices.until
             and case when name in (select unnest($3::text[])) and not suspect
                  and (expires_at is null or expires_at > clock_timestamp()) and id <> all($8::uuid[])
                  then true else false end
           order by created_at, id
           limit (select $4::integer)
           for update skip locked) as ready
     limit (select $4::integer)
), :take_next;


-- Takes the next tasks of many queues in one statement, at most $5 of each, in the order of the queues' names from the one
-- after $2. With a statement for each of 10,000 queues, a worker ran 10 tasks a second.
-- At most 200 queues that have a ready task are looked at. $7: the queues that the worker serves (null: all). $8: those that it
-- looks at by itself. $9: rows that are set aside, as in `claim`.
-- `reached` is the last queue that was looked at; null: there are no more queues behind it.
-- name: claim_each
with recursive queues as (
    (select queue from tasklib.tasks where ready and queue > $2::text order by queue limit 1)
    :further_queues
), looked_at as materialized (
    select queue from queues where queue is not null limit 200
), next as materialized (
    select ready.id, looked_at.queue
      from looked_at
     cross join lateral (
        select id from tasklib.tasks
         where ready and tasks.queue = looked_at.queue
           and case when name in (select unnest($3::text[])) and not suspect
                and (expires_at is null or expires_at > clock_timestamp()) and id <> all($9::uuid[])
                then true else false end
         order by priority desc, created_at, id
         limit (select $5::integer)
         for update skip locked) as ready
     where ($7::text[] is null or looked_at.queue = any($7::text[])) and looked_at.queue <> all($8::text[])
     order by looked_at.queue
     limit (select $4::integer)
), taken as (
    update tasklib.tasks
       set state = 'claimed', ready = false, due_at = null, next_retry_at = null, worker_id = $1::text,
           fencing_token = fencing_token + 1,
           (claimed_at, locked_until) = (
               select now, now + $6::double precision * interval '1 second' from (values (clock_timestamp())) as clock (now))
     where id = any(array(select id from next))
    returning :taken_columns
), noted as (
    insert into tasklib.claims (worker_id, locked_until, task_ids)
    select $1::text, max(locked_until), array_agg(id) from taken having count(*) > 0
    returning id as claim_id
), known as (
    select case when (select count(*) from next) < $4::integer then (select max(queue) from looked_at)
                else (select max(queue) from next) end as reached,
           (select count(*) from looked_at) < 200 and (select count(*) from next) < $4::integer as is_last,
           16777216 / greatest((select count(*) from next), 1) as most_bytes
)
select :claimed_columns, queue::text, case when not is_last then reached::text end as reached
from known left join (taken cross join noted) on true;


-- Takes suspects from all queues that the worker serves ($2; null: all), apart from those that are paused or leave it no permit
-- ($7): it would hold them for nothing, and hold up what it runs beside them. Suspects have a small index of their own, because a
-- busy worker looks for them four times a second, and because ordinary claims begin at a floor and would miss them.
-- They come without their arguments (most_bytes is 0), which the worker fetches when it starts one: suspects are few.
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
            and queue <> all($7::text[])
          order by priority desc, created_at, id
          limit $4::integer
          for update skip locked))
    returning :taken_columns
), noted as (
    insert into tasklib.claims (worker_id, locked_until, task_ids)
    select $1::text, max(locked_until), array_agg(id) from taken having count(*) > 0
    returning id as claim_id
)
select :claimed_columns, queue::text, null as reached
from taken cross join noted cross join (values (0)) as known (most_bytes);


-- The arguments that a claim left behind, for a task that its worker still holds.
-- name: arguments
select args::text, kwargs::text from tasklib.tasks
 where id = $2::uuid and worker_id = $1::text and fencing_token = $3::bigint;


-- The task that a claim of one would take, by the same conditions. A worker asks this after PostgreSQL has refused a claim, to
-- learn which row cannot be changed.
-- name: head
select id, name::text from tasklib.tasks
 where ready and ($1::text[] is null or queue = any($1::text[])) and name in (select unnest($2::text[]))
   and suspect = $3::boolean and (expires_at is null or expires_at > clock_timestamp()) and id <> all($4::uuid[])
 order by priority desc, created_at, id
 limit 1
 for update skip locked;


-- The tasks that one worker holds. A worker asks this after it has lost a connection, and perhaps an answer with it, or after a
-- failover to a database that lacks the last writes. A daemon asks it about a worker that has died.
-- `offset 0` keeps the lookup by key in place. Joined, a plan from when the table was small read the whole table.
-- name: held
select :held_columns, claim_id, clock_timestamp() as now
from (select claim.id as claim_id, taken.task_id
        from tasklib.claims as claim cross join unnest(claim.task_ids) as taken (task_id)
       where claim.worker_id = $1::text) as claim
cross join lateral (
    select * from tasklib.tasks
     where tasks.id = claim.task_id and tasks.worker_id = $1::text
    offset 0) as task
order by id;


-- Extends the lock of tasks that are still held when half of it has passed. A row that another session has locked delays no
-- other: its lock is extended the next time. So is that of a row whose ctid has changed since it was looked up.
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


-- Which of these tasks have a cancel request.
-- name: asked_to_stop
select id from tasklib.tasks where id = any($2::uuid[]) and worker_id = $1::text and cancel_asked_at is not null;


-- The next claims, by key, whose worker is dead or whose lock has passed. They come in pages after the key ($1, $2), so that
-- claims which cannot be recovered now do not hide those behind them.
-- A worker that has no row is dead too, because a failover may have lost the row. Its claims are left alone for the time of a
-- lease ($3; $4: how long a claim is locked). By then a live worker has noticed, and has stopped.
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


-- The tasks of one claim that its worker still holds, and that may be taken from it.
-- name: abandoned_tasks
select :held_columns
from tasklib.tasks as task
where task.id = any(array(select unnest(task_ids) from tasklib.claims where worker_id = $1::text and id = $2::bigint))
  and task.worker_id = $1::text
  and (task.locked_until < clock_timestamp()
       or not exists (select from tasklib.workers where worker_id = $1::text and died_at is null))
order by task.id;


-- Deletes a claim when its worker holds none of its tasks any more.
-- name: forget
delete from tasklib.claims as claim
 where claim.worker_id = $1::text and claim.id = $2::bigint
   and not exists (
       select from tasklib.tasks as task where task.id = any(claim.task_ids) and task.worker_id = claim.worker_id);
