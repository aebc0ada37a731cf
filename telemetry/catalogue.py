"""Every metric that the fleet exports. `docs/metrics.md` lists the same, and a test holds the two to each other.

Names, labels and buckets here are an interface: dashboards, alerts and `lorafleet top` read them. `model` is an
adapter's name in the catalog, `adapter` the first digits of a version's digest; no label is ever a client's text.
"""

from telemetry.metric import Metric, counter, gauge, histogram

FAST_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
SLOW_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WAIT_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
LOAD_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STAGING_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

BY_MODEL = ("model", "version")
DIGEST_LABEL_LENGTH = 12
"""Digits of a digest in `adapter`: replicas and gateways cut alike, or their series cannot be joined."""

REQUESTS = counter(
    "requests",
    "requests",
    "Calls that ended. `outcome` is `ok`, `disconnect` or an error's code.",
    *BY_MODEL,
    "outcome",
)
IN_FLIGHT = gauge("gateway_in_flight", "requests", "Calls being served.", *BY_MODEL)
PROMPT_TOKENS = counter("gateway_prompt_tokens", "tokens", "Prompt tokens of calls that no limit refused.", *BY_MODEL)
COMPLETION_TOKENS = counter("gateway_completion_tokens", "tokens", "Sampled tokens, as they arrive.", *BY_MODEL)
FIRST_TOKEN_S = histogram(
    "gateway_first_token_seconds", "seconds", "From a call to its first token, waiting included.", SLOW_S, *BY_MODEL
)
BETWEEN_TOKENS_S = histogram(
    "gateway_between_tokens_seconds",
    "seconds",
    "Gap between two tokens of a choice, observed once a message: its mean over the message's tokens.",
    FAST_S,
    *BY_MODEL,
)
LATENCY_S = histogram("gateway_latency_seconds", "seconds", "From a call to its last token.", SLOW_S, *BY_MODEL)
ERRORS = counter(
    "gateway_errors",
    "answers",
    "Answers with an error status. Errors in a stream that has begun are only in `outcome`.",
    "code",
)
LIMITED = counter(
    "gateway_limited", "requests", "Calls that a limit of their tenant refused (throttled).", "tenant", "limit"
)
PLACEMENTS = counter(
    "gateway_placements",
    "placements",
    "Requests placed on a replica. `kind`: at a `home`, `spill` (elsewhere, since home was full or failed), `base`."
    " `held`: where the replica had the version, as last heard: `slot`, `host` or `none`.",
    "kind",
    "held",
)
REPLICA_LOAD = gauge(
    "gateway_replica_load", "requests", "Requests on a replica that count against its bound.", "replica"
)
REPLICA_LOAD_BOUND = gauge(
    "gateway_replica_load_bound", "requests", "A replica takes no other's requests at this load.", "replica"
)
GATEWAY_REVISION = gauge("gateway_revision", "revision", "Catalog revision that the gateway serves by.")
GATEWAY_REPLICAS = gauge("gateway_replicas", "replicas", "Replicas that the gateway knows and may send requests to.")
ADAPTER_INFO = gauge(
    "adapter_info",
    "",
    "1 for every version in service, so that `adapter` can be joined with names. Of several names the first.",
    "adapter",
    *BY_MODEL,
)
TENANT_REQUESTS = counter("tenant_requests", "requests", "Calls of a tenant that ended.", "tenant", "outcome")
TENANT_TOKENS = counter(
    "tenant_tokens", "tokens", "Tokens of a tenant's calls, as they arrive: `prompt` or `completion`.", "tenant", "kind"
)
TENANT_IN_FLIGHT = gauge("tenant_in_flight", "requests", "Calls of a tenant being served.", "tenant")
TENANT_FIRST_TOKEN_S = histogram(
    "tenant_first_token_seconds", "seconds", "From a tenant's call to its first token.", SLOW_S, "tenant"
)

GATEWAY: tuple[Metric, ...] = (
    *(REQUESTS, IN_FLIGHT, PROMPT_TOKENS, COMPLETION_TOKENS, FIRST_TOKEN_S, BETWEEN_TOKENS_S, LATENCY_S),
    *(TENANT_REQUESTS, TENANT_IN_FLIGHT, TENANT_TOKENS, TENANT_FIRST_TOKEN_S, LIMITED, ERRORS),
    *(PLACEMENTS, REPLICA_LOAD, REPLICA_LOAD_BOUND, GATEWAY_REVISION, GATEWAY_REPLICAS, ADAPTER_INFO),
)

SEQUENCES = gauge(
    "replica_sequences", "requests", "Requests `waiting` and `loading` (their adapter), choices `running`.", "state"
)
CHOICES = counter("replica_choices", "choices", "Choices that ended: `stop`, `length`, `abort`, `error`.", "outcome")
REPLICA_PROMPT_TOKENS = counter("replica_prompt_tokens", "tokens", "Prompt tokens of requests that began to compute.")
GENERATION_TOKENS = counter("replica_generation_tokens", "tokens", "Tokens sampled, counted as they are read back.")
QUEUE_WAIT_S = histogram(
    "replica_queue_wait_seconds", "seconds", "From submission to a request's first step.", WAIT_S, *BY_MODEL
)
STEP_SECONDS = histogram("replica_step_seconds", "seconds", "A step of the loop that computed something.", STEP_S)
STEPS = counter("replica_steps", "steps", "Such steps.")
BATCH_TOKENS = histogram("replica_batch_tokens", "tokens", "Tokens of a step.", SIZES)
BATCH_SEQUENCES = histogram("replica_batch_sequences", "sequences", "Sequences of a step.", SIZES)
BATCH_ADAPTERS = histogram("replica_batch_adapters", "adapters", "Distinct adapters of a step.", (0, *SIZES))
KV_BLOCKS = gauge("replica_kv_blocks", "blocks", "KV blocks `used` and `free`.", "state")
PREEMPTIONS = counter("replica_preemptions", "sequences", "Sequences that lost their KV blocks and compute again.")
PAUSES = counter(
    "replica_pauses", "sequences", "Sequences that gave their row of the batch to a tenant below its share."
)
FOUND_TOKENS = counter("replica_found_tokens", "tokens", "Tokens that the prefix cache saved from being computed.")
SLOTS = gauge(
    "adapter_slots", "slots", "Slots `free`, `loading`, `resident` (nobody uses it just now) and `pinned`.", "state"
)
ARENA_BYTES = gauge("adapter_arena_bytes", "bytes", "Device memory for adapters, `used` and `free`.", "state")
HOST_BYTES = gauge("adapter_host_bytes", "bytes", "Host memory for adapters, `used` and `free`.", "state")
RESIDENT = gauge("adapter_resident", "", "1 where an adapter is: `slot` or `host`.", "adapter", "tier")
ADAPTERS_WAITING = gauge("adapter_waiting", "adapters", "Adapters that requests wait for.")
HITS = counter(
    "adapter_hits",
    "lookups",
    "Look-ups that found the adapter in `slot`, `host`, `node`; a tier is asked when the one before it missed.",
    "tier",
)
MISSES = counter("adapter_misses", "lookups", "Look-ups that did not find it there.", "tier")
LOADS = counter(
    "adapter_loads", "loads", "Loads into a slot, by where the bytes came from: `host`, `node`, `blob`.", "source"
)
EVICTIONS = counter(
    "adapter_evictions",
    "evictions",
    "Adapters that left `slot`, `host`, `node`: `room` for another one, `withdrawn` from service, or `damaged` bytes."
    " The rate of slot, room is the swap rate.",
    "tier",
    "cause",
)
LOAD_FAILURES = counter("adapter_load_failures", "loads", "Loads that failed.")
LOAD_SECONDS = histogram(
    "adapter_load_seconds",
    "seconds",
    "Stages of loads: `fetch` (registry to node), `read` and `convert` (node to host), `wait` (for the step loop and"
    " for room), `copy` (host to slot), `publish` (for the step loop), `total`.",
    LOAD_S,
    "source",
    "stage",
)
TENANT_SERVICE = counter(
    "tenant_service_tokens", "tokens", "Service that a tenant had: prompt tokens begun, and tokens sampled.", "tenant"
)
TENANT_WAITING = gauge(
    "tenant_waiting", "requests", "A tenant's requests of which nothing has been computed yet.", "tenant"
)
TENANT_OLDEST_WAIT = gauge(
    "tenant_oldest_wait_seconds", "seconds", "How long the oldest of them has waited; 0 without one.", "tenant"
)
TENANT_DEFICIT = gauge(
    "tenant_deficit_tokens",
    "tokens",
    "Tokens that a tenant may still be charged in this round of fair queueing; 0 when nothing waits.",
    "tenant",
)
TENANT_QUEUE_WAIT_S = histogram(
    "tenant_queue_wait_seconds", "seconds", "From submission to the first step, by tenant.", WAIT_S, "tenant"
)
STAGING_SECONDS = histogram(
    "replica_staging_seconds",
    "seconds",
    "Bringing a version's bytes onto the node when it is pushed: `ok`, or `failed`.",
    STAGING_S,
    "outcome",
)
STAGING = gauge(
    "replica_staging", "versions", "Versions being staged (`under_way`), and those that cannot be (`failed`).", "state"
)
REPLICA_REVISION = gauge("replica_revision", "revision", "Catalog revision that the replica has acted upon.")

REPLICA: tuple[Metric, ...] = (
    *(SEQUENCES, CHOICES, REPLICA_PROMPT_TOKENS, GENERATION_TOKENS, QUEUE_WAIT_S, STEP_SECONDS, STEPS),
    *(BATCH_TOKENS, BATCH_SEQUENCES, BATCH_ADAPTERS, KV_BLOCKS, PREEMPTIONS, PAUSES, FOUND_TOKENS),
    *(SLOTS, ARENA_BYTES, HOST_BYTES, RESIDENT, ADAPTERS_WAITING, HITS, MISSES, LOADS, EVICTIONS),
    *(LOAD_FAILURES, LOAD_SECONDS),
    *(TENANT_SERVICE, TENANT_WAITING, TENANT_OLDEST_WAIT, TENANT_DEFICIT, TENANT_QUEUE_WAIT_S),
    *(STAGING_SECONDS, STAGING, REPLICA_REVISION),
)

REGISTRY_REVISION = gauge("registry_revision", "revision", "Revision of the newest change.")
REPLICA_LAG = gauge(
    "registry_replica_lag", "revisions", "How far what a replica has acted upon is behind the newest change.", "replica"
)
REPLICA_LAG_S = gauge(
    "registry_replica_lag_seconds",
    "seconds",
    "Age of the oldest change that a replica has not acted upon; 0 when there is none.",
    "replica",
)
GATEWAY_LAG = gauge(
    "registry_gateway_lag", "revisions", "How far a gateway's catalog is behind the newest change.", "gateway"
)
REGISTRY_REPLICAS = gauge("registry_replicas", "replicas", "Replicas with a lease: `ready`, or `drained`.", "state")
VERSIONS = gauge(
    "registry_versions",
    "versions",
    "Versions by state: `active`, `draining`, `retired`, `collected`, `quarantined`.",
    "state",
)
ACTIVATIONS = counter(
    "registry_activations",
    "activations",
    "Activations that ended: `done`, `failed`, or `superseded` by a later one.",
    "outcome",
)
ACTIVATIONS_OPEN = gauge(
    "registry_activations_open",
    "activations",
    "Activations that replicas have yet to stage (`pending`), and that gateways have yet to see (`flipped`).",
    "state",
)
OLDEST_OPEN = gauge(
    "registry_oldest_open_seconds", "seconds", "Age of the oldest of those, since its request; 0 without one."
)
PROPAGATION_S = histogram(
    "registry_propagation_seconds",
    "seconds",
    "From an activation's request until every replica had the version and the alias moved.",
    STAGING_S,
)

REGISTRY: tuple[Metric, ...] = (
    *(REGISTRY_REVISION, REPLICA_LAG, REPLICA_LAG_S, GATEWAY_LAG, REGISTRY_REPLICAS, VERSIONS),
    *(ACTIVATIONS, ACTIVATIONS_OPEN, OLDEST_OPEN, PROPAGATION_S),
)

PROCESSES = {"Gateway": GATEWAY, "Replica": REPLICA, "Registry": REGISTRY}
"""Who exports what."""
