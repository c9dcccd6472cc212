-- Statements of a worker that is about to sleep: the other side of the function `ring`.


-- Registers the worker as sleeping, by one advisory lock for each queue. Then asks whether another session is about to commit that
-- may have looked for sleepers before. The order matters, and the aggregate in the subquery enforces it. The locks are only tried,
-- because a ringing session holds each of them for a moment. Answers which locks are held now, and whether no session was about to
-- commit.
-- name: arm
select held.queues, pg_try_advisory_xact_lock(hashtext('tasklib.flight'), 0)
from (
    select coalesce(array_agg(queue), '{}') as queues
      from unnest($1::text[]) as queue
     where pg_try_advisory_lock_shared(hashtext('tasklib.sleep'), hashtext(queue))
) as held;


-- Releases these locks.
-- name: disarm
select count(pg_advisory_unlock_shared(hashtext('tasklib.sleep'), hashtext(queue))) from unnest($1::text[]) as queue;
