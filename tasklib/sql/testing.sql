-- Statements for the tests of applications: see tasklib/testing.py. Nothing else sends them.


-- Deletes everything. A trigger deletes the attempts with their tasks.
-- name: empty
with
    tasks as (delete from tasklib.tasks),
    claims as (delete from tasklib.claims),
    elections as (delete from tasklib.elections),
    rollups as (delete from tasklib.task_rollups),
    states as (delete from tasklib.worker_states),
    functions as (delete from tasklib.task_functions),
    queues as (delete from tasklib.queues),
    policy as (update tasklib.policy set cluster_wide_cap = null, refuses_unknown_queues = false, features = '{}'
                where cluster_wide_cap is not null or refuses_unknown_queues or features <> '{}'),
    permits as (delete from tasklib.permits),
    rates as (delete from tasklib.rates),
    breakers as (delete from tasklib.breakers),
    transitions as (delete from tasklib.task_transitions)
delete from tasklib.workers;


-- Moves all waiting tasks into the past, as if they had been submitted that much earlier. All of their times move together, so that
-- their order and distances stay. Promote and expire then judge by the real clock, as always. Tasks that are held or final stay as
-- they are, because their times are history.
-- name: travel
update tasklib.tasks
   set created_at = created_at - passed.time, scheduled_at = scheduled_at - passed.time,
       next_retry_at = next_retry_at - passed.time, expires_at = expires_at - passed.time,
       deadline_at = deadline_at - passed.time, due_at = due_at - passed.time
  from (select $1::double precision * interval '1 second') as passed (time)
 where state = 'pending' or next_retry_at is not null;


-- The database's clock.
-- name: clock
select clock_timestamp();


-- Stops the time since $1, or since the submit of later tasks: all times of waiting tasks move on with the clock. Tasks that get the
-- same time keep their order, because ids grow.
-- name: hold
update tasklib.tasks as task
   set created_at = created_at + held.time, scheduled_at = scheduled_at + held.time,
       next_retry_at = next_retry_at + held.time, expires_at = expires_at + held.time,
       deadline_at = deadline_at + held.time, due_at = due_at + held.time
  from (select id, statement_timestamp() - greatest(created_at, $1::timestamptz)
          from tasklib.tasks
         where state = 'pending' or next_retry_at is not null) as held (id, time)
 where task.id = held.id and held.time > interval '0';


-- The tasks that one worker has executed, in the order of their first start.
-- name: executed
select task_id from tasklib.task_attempts where worker_id = $1::text group by task_id order by min(started_at), task_id;


-- Waits until the database's clock has passed the end of all executions of one worker. A worker's clock may be ahead by as long as an
-- answer took. Otherwise a retry in 300 s might not be due after `travel(300)`.
-- name: pass_last_end
select pg_sleep(least(coalesce(extract(epoch from max(finished_at) - clock_timestamp()), 0), 10)::double precision)
  from tasklib.task_attempts where worker_id = $1::text;
