-- Statements of who sleeps: the other side of the function `ring`.


-- First the locks that say who sleeps, then whether anybody is about to commit who may have looked before: the second
-- must not be asked before the first are held, and an aggregate below it makes sure. Tries alone: who rings holds each
-- for a moment. Answers which are held now, and whether nobody was about to commit.
-- name: arm
select held.queues, pg_try_advisory_xact_lock(hashtext('tasklib.flight'), 0)
from (
    select coalesce(array_agg(queue), '{}') as queues
      from unnest($1::text[]) as queue
     where pg_try_advisory_lock_shared(hashtext('tasklib.sleep'), hashtext(queue))
) as held;


-- name: disarm
select count(pg_advisory_unlock_shared(hashtext('tasklib.sleep'), hashtext(queue))) from unnest($1::text[]) as queue;
