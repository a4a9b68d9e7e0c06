"""The keys of node.meta and gm.meta by which passes hand on what they know."""

# Of node.meta, and what they say. Passes use no others.
META = {
    "val": "fake value of a node of the traced graph",
    "role": "Role of an input of the traced graph",
    "origin": "Origin of an input of the model's graph",
    "arguments": "what the caller calls an input of the model's graph",
    "dim": "dimension along which a batch input is cut",
    "name": "the user's name of an input",
    "index": "position of an input in the call",
    "input": "position of a batch input in the call",
    "tangent": "the output whose gradient this placeholder is",
    "module": "module that a node was called in",
    "work": "Work of a node of the traced graph",
    "estimated": "its estimated Times, where a profile gave it its work",
    "source": "the node of the model's graph that it was made of",
    "key": "name that a node keeps in other traces of the model",
    "seconds": "estimated or measured seconds of a stage's call",
    "mutates": "fake tensors that a node writes into",
    "learns": "of these, running statistics of a normalization",
    "stack_trace": "the user's line",
    "recompute": "which call of torch.utils.checkpoint a node is in, if any",
    "rows": "Rows of a node's value: how it depends on the batch",
    "joint": "whether a node of the traced graph is of all rows of the batch",
    "stage": "stage of a node",
    "passed": "stages that give a value that they read to the next that does",
    "direction": "Direction of a stage's call",
    "group": "number of a group of weights, or of the sum of its gradients",
    "random": "how many draws of random numbers a node makes",
    "replicated": "whether they are made once for all microbatches",
    "shard": "shard of a stage that a node is of",
    "owners": "who keeps a part of a weight since an earlier plan",
    "updater": "who updates it since then, if u said",
    "level": "how often shards read each other before it",
    "draws": "its draws in the model, which are the same on all shards",
    "draw": "number of a stage's first draw in the model; None if it makes none",
    "specs": "shapes of the tensors in a value",
    "held": "bytes of memory that a value takes which no other one of its job has",
    "received": "bytes of memory that it takes where a message brings it",
    "bundle": "whether a value is a tuple of tensors",
    "trained": "whether what a stage gives has a gradient",
    "worker": "worker that runs a node",
    "task": "job or other piece of work that a node belongs to",
    "n": "priority of that task",
    "job": "job that a call is",
    "custom": "number of the node of a stage that a flat graph's node is of, as `line`",
    "own": "whether a user's pass made the node",
    "replaces": "name of the node that it is in the place of, by what a pass says",
}

# Those that no one reads once stages are differentiated; compilers of stages read "val"
# of placeholders.
SPENT = ("val", "origin", "arguments", "work", "estimated", "mutates", "learns", "rows")

# Of gm.meta.
GRAPH_META = {
    "facts": "Facts of the model",
    "lines": "the user's lines of a stage's nodes",
    "replaced": "whether a pass of the user may have changed a stage",
}
