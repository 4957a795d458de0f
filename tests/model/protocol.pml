/*
 * The claim protocol as a model for Spin: two clients that retry, a sweep, a purge, the clock, one process that dies and
 * one server that crashes. Each atomic block is one statement or one COMMIT of the package. Between two blocks a process
 * may die, sleep for an hour, or be overtaken.
 *
 * The operation is the default: transaction=True and REEXECUTE. With -DPARK it is transaction=False and PARK.
 * With -DRETENTION the retention of the first key may end, and a purge runs.
 * -DWITHOUT_X=1 removes the guard X. test_model.py lists what each removal breaks.
 *
 * decide.pml is generated from idempotency.lifecycle.decide().
 */
mtype = { in_progress, completed, recoverable, parked };
mtype = { REPLAY, WAIT, REFUSE_REUSED, TAKE_OVER, START_OVER, PARK_ABANDONED, REPORT_PARKED };

#define KEYS 2
#define CLIENTS 2
#ifndef REQUESTS
#define REQUESTS 2
#endif
#define NONE 255

typedef Row {
	bool here;           /* the scope has a record */
	byte id;
	byte attempt;
	byte payload;        /* the fingerprint */
	mtype status;
	bool lease_over;
	bool retention_over;
	bool durable;        /* on disk; a crash of the server forgets other rows */
	byte lock;           /* the process that has updated the row and not committed yet, or 0 */
	byte outcome;        /* the payload of the recorded outcome */
	byte owner;          /* not in the table: the client whose claim is the latest */
}

Row row[KEYS];
byte next_id = 1, durable_id = 1;
byte effects[KEYS];      /* of the latest retention */
byte retention[KEYS];    /* the number of the latest retention */
byte server = 0;         /* how often the server has crashed: a transaction of an earlier life is gone */
#ifndef CRASHES
#define CRASHES 1
#endif
byte deaths = 1, crashes = CRASHES;
byte running = CLIENTS;
/* A COMMIT sent by a client whose connection then broke. The server executes it, or rolls back. */
byte sent_row[3] = NONE, sent_payload[3], sent_key[3];

#include "decide.pml"

/* Guards that are conditions. WITHOUT_X is 1 if the guard X is removed, and 0 otherwise. */
#define CLAIMABLE(k) (WITHOUT_CLAIMABLE || row[k].status == recoverable || ABANDONED(k))
#define PAST_RETENTION(k) (WITHOUT_RETENTION_AGAIN || row[k].retention_over)
#define NOT_LIVE(k) (WITHOUT_LIVE_AGAIN || row[k].status != in_progress || row[k].lease_over)
#define NOT_PARKED(k) (WITHOUT_PARKED_AGAIN || row[k].status != parked)
#define STILL_ABANDONED(k) (WITHOUT_ABANDONED_AGAIN || ABANDONED(k))
#define PURGEABLE(k) (WITHOUT_PURGEABLE || row[k].status == completed || row[k].status == recoverable)
#define ABANDONED(k) (row[k].status == in_progress && row[k].lease_over)
/* The outcome of the record is unknown, so its retention does not end: another effect would be a second one. */
#ifdef PARK
#define UNKNOWN(k) (row[k].status != completed)
#else
#define UNKNOWN(k) (row[k].status == parked)
#endif

/* What a fence matches. Without the scope it matches the row that has the id now, regardless of its key. */
#define OBSERVED(k, i, n, p) (row[k].here && (WITHOUT_ID || row[k].id == i) && \
	(WITHOUT_ATTEMPT || row[k].attempt == n) && (WITHOUT_PAYLOAD || row[k].payload == p))
#define FENCE(k, i, n, p) (OBSERVED(k, i, n, p) && (WITHOUT_STATUS || row[k].status == in_progress))

/* With -DMOVES each move of a record is printed once. test_model.py compares them with moves.py. */
#ifdef MOVES
c_decl {
	static char *state_names[] = {"absent", "in_progress", "completed", "recoverable", "parked"};
	static char made[5][5][2];
}
byte from, to, more;
#define STATE(k) (!row[k].here -> 0 : (row[k].status == in_progress -> 1 : (row[k].status == completed -> 2 : \
	(row[k].status == recoverable -> 3 : 4))))
inline moves(k, t, m) {
	d_step {
		from = STATE(k);
		to = t;
		more = m;
		c_code {
			if (!made[now.from][now.to][now.more]) {
				made[now.from][now.to][now.more] = 1;
				printf("move: %s %s %d\n", state_names[now.from], state_names[now.to], now.more);
			}
		};
		from = 0; to = 0; more = 0
	}
}
#else
#define moves(k, t, m) skip
#endif

inline flush() {
	d_step {
		row[0].durable = row[0].here;
		row[1].durable = row[1].here;
		durable_id = next_id
	}
}

inline begin_retention(k) {
	effects[k] = 0;
	retention[k]++
}

/* The sweep's update, some time after its select. */
inline settle(k, i) {
	atomic {
		if
		:: row[k].here && row[k].id == i && row[k].lock == 0 && STILL_ABANDONED(k) ->
#ifdef PARK
			moves(k, 4, 0);
			row[k].status = parked;
#else
			moves(k, 3, 0);
			row[k].status = recoverable;
#endif
			row[k].lease_over = false;
			flush()
		:: else
		fi;
		i = 0
	}
}

/* The process dies here, at most once in a run. Its transaction is rolled back. */
#define MAY_DIE if :: atomic { deaths > 0 -> deaths-- }; goto forget :: true fi

/* The row that a fenced statement changes. */
inline find_fenced() {
	where = NONE;
	if
	:: FENCE(k, id, attempt, payload) -> where = k
#if WITHOUT_SCOPE
	:: !FENCE(k, id, attempt, payload) && FENCE(1 - k, id, attempt, payload) -> where = 1 - k
	:: !FENCE(k, id, attempt, payload) && !FENCE(1 - k, id, attempt, payload) -> skip
#else
	:: !FENCE(k, id, attempt, payload) -> skip
#endif
	fi
}

/*
 * P6: only the latest claim changes its record. There is one exception: a crash of the server can forget a claim that
 * was not on disk and give its id to the next claim of the same scope and payload.
 */
inline check_owner(r) {
	assert(row[r].owner == me || server > 0)
}

inline answer(k, payload) {
	/* P4 and P8: an outcome is returned only for its own payload. P2: it has exactly one effect. */
	assert(row[k].outcome == payload);
	assert(effects[k] == 1)
}

inline commit(r, k, p) {
	row[r].lock = 0;
	moves(r, 2, 0);
	row[r].status = completed;
	row[r].lease_over = false;
	row[r].outcome = p;
	effects[k]++;
	assert(r == k);               /* no other scope's record is completed */
	assert(row[r].payload == p);  /* nor another payload's */
	assert(effects[k] <= 1);      /* P1 */
	flush()
}

/* Ends the COMMITs that were sent over connections that then broke. */
active proctype Backend() {
	byte c;
end:
	do
	:: atomic {
		sent_row[1] != NONE || sent_row[2] != NONE ->
			if
			:: sent_row[1] != NONE -> c = 1
			:: sent_row[2] != NONE -> c = 2
			fi;
			if
			:: commit(sent_row[c], sent_key[c], sent_payload[c])
			:: row[sent_row[c]].lock = 0
			fi;
			sent_row[c] = NONE;
			c = 0
	   }
	od
}

proctype Client(byte me) {
	byte requests = REQUESTS, k, payload, id, attempt, life, where;
	mtype status, decision;
	bool lease_over, retention_over;
	byte seen_payload, mine;

next:
	if
	:: requests == 0 -> goto done
	:: requests > 0 -> requests--
	fi;
	atomic {
		if
		:: k = 0
		:: k = 1
		fi;
		if
		:: payload = 1
		:: payload = 2
		fi
	}

	/* store.insert_claim: the unique constraint lets one insert win. A loser reads the record. */
	atomic {
		if
		:: !row[k].here ->
			moves(k, 1, 0);
			row[k].here = true;
			row[k].id = next_id;
			next_id++;
			row[k].attempt = 1;
			row[k].payload = payload;
			row[k].status = in_progress;
			row[k].lease_over = false;
			row[k].retention_over = false;
			row[k].outcome = 0;
			row[k].owner = me;
			mine = retention[k];
			id = row[k].id;
			attempt = 1;
#if defined(PARK) && !WITHOUT_WAIT_FOR_DISK
			flush();
#endif
			goto own
		:: row[k].here ->
			id = row[k].id;
			attempt = row[k].attempt;
			seen_payload = row[k].payload;
			status = row[k].status;
			lease_over = row[k].lease_over;
			retention_over = row[k].retention_over
		fi
	}

	/* lifecycle.decide, on values read some time ago */
	atomic {
		decide(decision, status, lease_over, retention_over, payload == seen_payload);
		if
		:: decision == REPLAY ->
			/* P5 and P2 as of the read; the record may be purged meanwhile, and then a new retention has begun */
			if
			:: row[k].here && row[k].id == id && row[k].attempt == attempt && row[k].status == completed -> answer(k, payload)
			:: else
			fi;
			goto forget
		:: decision == TAKE_OVER || decision == START_OVER
		:: else -> goto forget
		fi
	}
	atomic {
		if
		:: decision == TAKE_OVER ->
			/* store.take_over: waits for a locked row only up to a timeout */
			if
			:: OBSERVED(k, id, attempt, seen_payload) && row[k].lock == 0 && CLAIMABLE(k) ->
				moves(k, 1, 1);
				row[k].attempt++;
				row[k].status = in_progress;
				row[k].lease_over = false;
				row[k].retention_over = false;
				row[k].owner = me;
				mine = retention[k];
				attempt = row[k].attempt;
				flush()
			:: else -> goto forget
			fi
		:: decision == START_OVER ->
			/* store.start_over */
			if
			:: OBSERVED(k, id, attempt, seen_payload) && row[k].lock == 0 && PAST_RETENTION(k) && NOT_LIVE(k) &&
				NOT_PARKED(k) ->
				moves(k, 1, 1);
				if :: UNKNOWN(k) :: else -> begin_retention(k) fi;
				row[k].attempt++;
				row[k].payload = payload;
				row[k].status = in_progress;
				row[k].lease_over = false;
				row[k].retention_over = false;
				row[k].outcome = 0;
				row[k].owner = me;
				mine = retention[k];
				attempt = row[k].attempt;
				flush()
			:: else -> goto forget
			fi
		fi
	}

own:
	MAY_DIE;
#ifdef PARK
	/* The outside effect happens at once. The model's clients die, sleep and are overtaken here, too. */
	/* P1. A process that sleeps past the retention makes the effect of its old operation. */
	atomic { if :: mine == retention[k] -> effects[k]++; assert(effects[k] <= 1) :: else fi }
	MAY_DIE;
	atomic {
		find_fenced();
		if
		:: where != NONE && row[where].lock == 0 -> check_owner(where); moves(where, 2, 0); row[where].status = completed; row[where].outcome = payload; flush()
		:: else -> goto forget
		fi
	}
	atomic { if :: row[k].here && row[k].id == id && row[k].attempt == attempt && row[k].status == completed -> answer(k, payload) :: else fi }
#else
	life = server;      /* BEGIN, and the handler's writes: pending until COMMIT */
	if
	:: true             /* the handler succeeds */
	:: goto fail        /* the handler fails; its writes are rolled back */
	fi;
	MAY_DIE;
	/* store.complete: the last statement. It waits for the row's lock. */
	atomic {
		(row[0].lock == 0 && row[1].lock == 0) || life != server;
		if
		:: life != server -> goto fail
		:: else ->
			find_fenced();
			if
			:: where != NONE -> check_owner(where); row[where].lock = me
			:: where == NONE ->  /* the lease was lost: the writes are rolled back */
#if WITHOUT_ROLLBACK
				effects[k]++;
				assert(effects[k] <= 1);
#endif
				goto forget
			fi
		fi
	}
	if
	:: deaths > 0 -> atomic { deaths--; if :: life == server -> row[where].lock = 0 :: else fi; goto forget }
	:: true
	fi;
	/* COMMIT: both or neither */
	atomic {
		if
		:: life != server -> goto unknown
		:: life == server && sent_row[me] == NONE -> sent_row[me] = where; sent_payload[me] = payload; sent_key[me] = k; goto unknown
		:: life == server -> commit(where, k, payload)
		fi
	}
	/* The client gets its 2xx. */
	atomic { if :: row[k].here && row[k].id == id && row[k].attempt == attempt -> answer(k, payload) :: else fi }
	goto forget;
unknown:
#if WITHOUT_UNKNOWN
	goto fail;          /* treats an unanswered COMMIT as a rollback, and releases the claim by its id */
#endif
	goto forget;
fail:
	/* store.release: fenced, in a separate transaction */
	MAY_DIE;
	atomic {
#if WITHOUT_FENCED_RELEASE
		if
		:: row[k].here && row[k].lock == 0 -> check_owner(k); moves(k, 3, 0); row[k].status = recoverable; flush()
		:: else
		fi
#else
		(row[0].lock == 0 && row[1].lock == 0);
		find_fenced();
		if
		:: where != NONE -> check_owner(where); moves(where, 3, 0); row[where].status = recoverable; flush()
		:: else
		fi
#endif
	}
#endif
forget:
	atomic {
		k = 0; payload = 0; id = 0; attempt = 0; life = 0; where = 0; seen_payload = 0;
		mine = 0; lease_over = false; retention_over = false; status = 0; decision = 0
	}
	goto next;
done:
	running--
}

/* Any lease and any retention may end between any two statements: by time, or because a session is gone. */
active proctype Clock() {
	byte k;
end:
	do
	:: atomic { row[0].here && row[0].status == in_progress && !row[0].lease_over -> row[0].lease_over = true }
	:: atomic { row[1].here && row[1].status == in_progress && !row[1].lease_over -> row[1].lease_over = true }
#ifdef RETENTION
	:: atomic { row[0].here && !row[0].retention_over -> row[0].retention_over = true }
#endif
	od
}

/* sweep._settle_at_once, one row at a time: select, then change by the same conditions. */
active proctype Sweep() {
	byte id;
end:
	do
#if !WITHOUT_SWEEP
	:: atomic { row[0].here && row[0].status == in_progress && row[0].lease_over && row[0].lock == 0 -> id = row[0].id }
	   settle(0, id)
	:: atomic { row[1].here && row[1].status == in_progress && row[1].lease_over && row[1].lock == 0 -> id = row[1].id }
	   settle(1, id)
#else
	:: false
#endif
	od
}

#ifdef RETENTION
active proctype Purge() {
end:
	do
	:: atomic {
		row[0].here && row[0].retention_over && row[0].lock == 0 && PURGEABLE(0) ->
			moves(0, 0, 0);
			row[0].here = false;
			begin_retention(0);
			flush()
	   }
	od
}
#endif

active proctype Server() {
end:
	atomic {
		crashes > 0 && running > 0 ->
			crashes--;
			server++;
			next_id = durable_id;
			row[0].lock = 0;
			row[1].lock = 0;
			sent_row[1] = NONE;
			sent_row[2] = NONE;
			if :: row[0].here && !row[0].durable -> row[0].here = false :: else fi;
			if :: row[1].here && !row[1].durable -> row[1].here = false :: else fi
	}
}

init {
	atomic { run Client(1); run Client(2) }
	/* P7: when no process can continue, no claim is left in progress. */
	timeout;
	assert(running == 0);
	assert(!row[0].here || row[0].status != in_progress);
	assert(!row[1].here || row[1].status != in_progress)
}
