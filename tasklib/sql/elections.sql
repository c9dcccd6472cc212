-- Statements about elections: who does what is done once for all daemons. A row lease, not a session lock: it ends by
-- itself, whatever became of its holder's connection.


-- To be elected, or to stay so. A row comes back for the holder only. While another holds it, nothing is written and no
-- row is locked: that is what all the others do all day. The clock is read again when the row's lock is held. A term that
-- would last for more than an hour is nobody's: the clock was set back, or somebody wrote it by hand.
-- name: stand
insert into tasklib.elections as election (name, holder, term, until)
select $1::text, $2::text, 1, clock_timestamp() + $3::double precision * interval '1 second'
 where not exists (select from tasklib.elections
                    where name = $1::text and holder <> $2::text and until > clock_timestamp()
                      and until < clock_timestamp() + interval '1 hour')
on conflict (name) do update
    set holder = excluded.holder, until = clock_timestamp() + $3::double precision * interval '1 second',
        term = least(
            election.term + (election.holder <> excluded.holder or election.until < clock_timestamp())::integer,
            4611686018427387904)
    where election.holder = excluded.holder or election.until < clock_timestamp()
       or election.until > clock_timestamp() + interval '1 hour'
returning term;


-- The holder leaves: the next one need not wait.
-- name: resign
update tasklib.elections set until = clock_timestamp() where name = $1::text and holder = $2::text;
