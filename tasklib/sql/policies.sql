-- What workers ask about queue policies. Operators change them by tasklib.set_queue and its neighbours.


-- The version of all policies. A worker that works asks once a second, unless a claim has told it.
-- name: version
select version from tasklib.policy;


-- All policies that concern a worker, each with the version. One row with nulls comes back if no queue has a policy.
-- name: policies
select policy.version, policy.cluster_wide_cap, queue.name::text, queue.paused_at is not null as is_paused,
       date_part('epoch', queue.paused_until) as paused_until,
       num_nonnulls(queue.max_running, queue.breaker_failures, queue.breaker_share) > 0 as has_cap, queue.max_per_worker,
       queue.rate_limit / queue.rate_seconds as starts_per_second,
       num_nonnulls(queue.breaker_failures, queue.breaker_share) > 0 as has_breaker, queue.breaker_codes,
       queue.ageing_seconds, queue.rank, queue.weight
  from tasklib.policy left join tasklib.queues as queue on true;


-- How many tasks each of these queues has that could be claimed, up to $3. A worker without a permit or a grant asks this before it
-- asks for one, because a claim would take what it may not start.
-- name: seen
select given.queue, (
    select count(*) from (
        select from tasklib.tasks
         where ready and queue = given.queue and name in (select unnest($2::text[]))
         order by priority desc, created_at, id
         limit (select $3::integer)) as ready)
  from unnest($1::text[]) as given (queue);


-- Whether any task could be claimed.
-- name: seen_any
select exists (select from tasklib.tasks where ready);


-- name: permit
select permits, target, breaker_epoch, breaker, again_seconds
  from tasklib.permit($1::text, $2::text, $3::integer, $4::integer);


-- name: grant
select granted, next_seconds from tasklib.grant_starts($1::text, $2::integer);


-- name: report
select tasklib.report_breaker($1::text, $2::bigint, $3::bigint, $4::bigint);


-- By a task that raises PauseQueue.
-- name: pause
select from tasklib.pause_queue($1::text, $2::text, to_timestamp($3::double precision), $4::text);


-- The permits of a worker that stops and holds no task any more.
-- name: give_up
delete from tasklib.permits where worker_id = $1::text;


-- The permits of a worker for queues that have no cap any more. If one is set again, they would count.
-- name: give_back
delete from tasklib.permits where worker_id = $1::text and queue = any($2::text[]);


-- name: forget
select tasklib.forget_permits();
