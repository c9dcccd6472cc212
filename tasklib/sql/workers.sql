-- Statements about workers and their leases. The lease is the worker's row: it is renewed once per worker, never per task.


-- Registers a worker. A second time, after the answer was lost, it is a renewal, because no other worker ever has this id. No row
-- comes back if the worker was declared dead meanwhile.
-- name: register
insert into tasklib.workers (worker_id, name, hostname, pid, process_name, queues, task_names, concurrency, lease_until, features)
values ($1::text, $2::text, $3::text, $4::integer, $5::text, $6::text[], $7::text[], $8::integer,
        clock_timestamp() + $9::double precision * interval '1 second', '{policies}')
on conflict (worker_id) do update
    set renewed_at = clock_timestamp(), lease_until = excluded.lease_until
    where workers.died_at is null
returning clock_timestamp();


-- Renews a lease. A worker that was declared dead stays dead: no row comes back. The lock of the row decides between this and
-- `declare_dead`.
-- name: renew
update tasklib.workers
   set renewed_at = clock_timestamp(), lease_until = clock_timestamp() + $2::double precision * interval '1 second',
       task_names = $3::text[], stopping = $4::boolean
 where worker_id = $1::text and died_at is null
returning clock_timestamp();


-- Renews the leases of workers that the keeper knows to be alive. A task that holds the interpreter's lock keeps its worker from
-- renewing its own lease. A row is written only if half of its lease has passed, which is rare.
-- name: renew_for
update tasklib.workers
   set renewed_at = clock_timestamp(), lease_until = clock_timestamp() + $2::double precision * interval '1 second'
 where worker_id = any($1::text[]) and died_at is null
   and lease_until < clock_timestamp() + $2::double precision / 2 * interval '1 second'
returning worker_id;


-- Deletes the worker's row, unless the worker still holds a claim.
-- name: deregister
delete from tasklib.workers
 where worker_id = $1::text and not exists (select from tasklib.claims where claims.worker_id = $1::text);


-- Declares workers dead whose lease has run out. The clock is read again when the row's lock is held. Until the server has been up
-- for a lease, no worker is declared dead, because none could renew while it was down.
-- name: declare_dead
update tasklib.workers
   set died_at = clock_timestamp()
 where died_at is null and lease_until < clock_timestamp()
   and pg_postmaster_start_time() < clock_timestamp() - $1::double precision * interval '1 second'
returning worker_id, name, hostname, pid;


-- Deletes the rows of dead workers that hold nothing any more, after the time for which they are kept for operators.
-- name: forget_dead
delete from tasklib.workers as worker
 where died_at < clock_timestamp() - $1::double precision * interval '1 second'
   and not exists (select from tasklib.claims where claims.worker_id = worker.worker_id);


-- Declares the options of a worker's task functions, for clients that submit by name. Only options that differ are written, and
-- those that were not declared for a day, so that a restart writes nothing. In the order of the names, so that two workers cannot
-- deadlock.
-- name: declare
insert into tasklib.task_functions (
    name, queue, priority, max_retries, timeout_seconds, store_result, on_crash, deadline_seconds, own)
select name, queue, priority, max_retries, timeout_seconds, store_result, on_crash, deadline_seconds, own
  from jsonb_to_recordset($1::jsonb) as given (
        name text, queue text, priority integer, max_retries integer, timeout_seconds double precision,
        store_result boolean, on_crash text, deadline_seconds double precision, own text[])
 where not exists (
        select from tasklib.task_functions as known
         where known.name = given.name and known.seen_at > clock_timestamp() - interval '1 day'
           and (known.queue, known.priority, known.max_retries, known.timeout_seconds, known.store_result, known.on_crash,
                known.deadline_seconds, known.own)
               is not distinct from
               (given.queue, given.priority, given.max_retries, given.timeout_seconds, given.store_result, given.on_crash,
                given.deadline_seconds, given.own))
 order by name
on conflict (name) do update
   set (queue, priority, max_retries, timeout_seconds, store_result, on_crash, deadline_seconds, own, seen_at)
     = (excluded.queue, excluded.priority, excluded.max_retries, excluded.timeout_seconds, excluded.store_result,
        excluded.on_crash, excluded.deadline_seconds, excluded.own, excluded.seen_at);


-- Deletes the options of functions that no worker has declared for a long time: a renamed function leaves its old row behind.
-- name: forget_functions
with gone as (
    delete from tasklib.task_functions
     where seen_at < clock_timestamp() - $1::double precision * interval '1 second'
    returning 1
)
select count(*) from gone;
