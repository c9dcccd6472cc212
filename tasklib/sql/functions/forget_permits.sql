-- Deletes the permits of workers that are dead, or unknown, and hold no claim any more: their tasks have been recovered. By
-- `died_at` alone, a task that is not recovered yet would count for nobody. Called in every round of the reaper, because a call of
-- `permit` that was under way when its worker died may be committed later. No permit ever ends by time.
create or replace function tasklib.forget_permits() returns bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    queues text[];
begin
    with forgotten as (
        delete from tasklib.permits as held
         where not exists (select from tasklib.claims as claim where claim.worker_id = held.worker_id)
           and not exists (select from tasklib.workers as worker
                            where worker.worker_id = held.worker_id and worker.died_at is null)
        returning held.queue)
    select array_agg(queue) into queues from forgotten;
    return case when queues is null then 0 else tasklib.ring_all(queues) end;
end
$$;
