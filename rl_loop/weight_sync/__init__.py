"""Transfer of weights from the trainer to the engines.

    gather      source, gather            the trainer's ranks join their shards
    transport   servers, transports       CUDA IPC, NCCL or gloo, shared memory, a disk
    verify      expected, checksums       names and shapes, contents of servers
                canary                    log-probs of engines
    publish     send                      the version, after all other steps

``send`` runs all four steps for servers. An embedded engine gets the gathered tensors through Ray's
object store, verifies names and shapes with ``expected``, and publishes the version after it has
copied all of them. The canary compares both kinds of engines with the trainer.

Configurations import ``source``, which needs neither torch nor Ray. Only ``gather`` needs Megatron.
"""
