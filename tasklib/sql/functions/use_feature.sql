-- Switches a feature on, for as long as it is used, unless a live worker does not know it: that worker would break what the feature
-- promises. The row's lock decides between this and a worker that registers: see refuse_old_worker. A feature that needs an index
-- calls require_index here; none does yet.
create or replace function tasklib.use_feature(feature text) returns void
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    old_worker text;
begin
    if (select use_feature.feature = any(features) from tasklib.policy) then
        return;
    end if;
    update tasklib.policy set features = features || use_feature.feature where use_feature.feature <> all(features);
    select worker_id into old_worker
      from tasklib.workers
     where died_at is null and lease_until > clock_timestamp() and use_feature.feature <> all(features)
     limit 1;
    if old_worker is not null then
        raise exception 'worker % is of a version that does not know %', old_worker, use_feature.feature using
            errcode = 'TL426', hint = 'Upgrade all workers first; then try again.';
    end if;
end
$$;
revoke all on function tasklib.use_feature(text) from public;
