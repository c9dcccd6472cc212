-- A worker that does not know a feature that is in use must not start: it would run tasks of a paused queue, or more than a cap
-- allows. The shared lock lets it wait for an operator who is switching the feature on. A worker that knows everything asks nothing.
-- A worker that was frozen for longer than its lease did not count when the feature was switched on. Its renewal finds no row, as
-- if it had been declared dead: then it registers anew, and is told.
create or replace function tasklib.refuse_old_worker() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    missing text;
begin
    select feature into missing
      from (select features from tasklib.policy for share) as policy, unnest(policy.features) as feature
     where feature <> all(new.features)
     limit 1;
    if missing is not null and tg_op = 'UPDATE' then
        return null;
    elsif missing is not null then
        raise exception 'this worker does not know %, which the queues of this database use', missing using
            errcode = 'TL426', hint = 'Upgrade tasklib-pg on this host.';
    end if;
    return new;
end
$$;
revoke all on function tasklib.refuse_old_worker() from public;

create or replace trigger refuse_old_worker before insert or update of lease_until on tasklib.workers
    for each row when (not new.features @> '{policies}') execute function tasklib.refuse_old_worker();
