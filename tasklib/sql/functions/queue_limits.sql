-- What each queue allows now. `permit`, `grant_starts` and everything that explains a wait read it; no other place states these
-- conditions. `cap` is null for a queue without one. A breaker is a cap: none while it is open, a few while it is half open.
-- The row '*' is the cap over all queues. `permits` is what workers hold of the cap. While they hold all of it, no task starts.
create or replace view tasklib.queue_limits as
select queue.name::text as queue,
       queue.paused_at is not null and coalesce(queue.paused_until > clock_timestamp(), true) as is_paused,
       case when breaker.state is null then queue.max_running
            else least(queue.max_running, case breaker.state when 'open' then 0 when 'half_open' then queue.breaker_probes
                                                             else 1000000 end)
       end as cap,
       breaker.state as breaker, breaker.epoch as breaker_epoch, breaker.open_until,
       queue.rate_limit, queue.rate_seconds, coalesce(queue.rate_burst, queue.rate_limit) as rate_burst,
       (select coalesce(sum(held.permits), 0) from tasklib.permits as held where held.queue = queue.name) as permits
  from tasklib.queues as queue
  left join lateral (
      select case when stored.state = 'open' and stored.open_until <= clock_timestamp() then 'half_open'
                  else coalesce(stored.state, 'closed') end as state,
             coalesce(stored.epoch, 1) as epoch, stored.open_until
        from (values (0)) as one left join tasklib.breakers as stored on stored.queue = queue.name
       where queue.breaker_failures is not null or queue.breaker_share is not null
  ) as breaker on true
union all
select '*', false, cluster_wide_cap, null, null, null, null, null, null,
       (select coalesce(sum(held.permits), 0) from tasklib.permits as held where held.queue = '*')
  from tasklib.policy where cluster_wide_cap is not null;

-- Whoever may read the policies may read what follows from them. A migration cannot say so, because functions and views come after
-- all migrations.
do $$
declare
    given record;
begin
    for given in
        select acl.is_grantable, case when acl.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(acl.grantee)) end as grantee
          from pg_class, aclexplode(relacl) as acl
         where pg_class.oid = 'tasklib.queues'::regclass and acl.grantee <> relowner and acl.privilege_type = 'SELECT'
    loop
        execute format('grant select on tasklib.queue_limits to %s%s',
                       given.grantee, case when given.is_grantable then ' with grant option' else '' end);
    end loop;
end
$$;
