"""Weights on their way from the trainer to the engines.

    gather      source, gather            the trainer's ranks join their shards
    transport   servers, transports       CUDA IPC, NCCL or gloo, shared memory, a disk
    verify      expected, checksums       names and shapes; what servers hold
                canary                    what engines compute
    publish     send                      a version, after all of the above

Servers follow all four steps in ``send``. An embedded engine gets the gathered tensors through Ray's
object store, verifies names and shapes with ``expected`` and publishes the version when it has copied
all of them. The canary compares both kinds of engines with the trainer.

Configurations import ``source``, which needs neither torch nor Ray. Only ``gather`` needs Megatron.
"""
