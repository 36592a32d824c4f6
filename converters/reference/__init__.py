"""The arithmetic of each model family, written out from its definition.

It is the one reference of ``gptoss certify``, ``gptoss convert verify`` and the tests.

* ``decoder``: the equations that all families share.
* ``gpt_oss`` and ``dense``: the equations of a family, and its layouts of weights.
* ``layouts``: Hugging Face's and Megatron's layout of weights, read one tensor at a time.
* ``rotary``: rotary frequencies.
* ``mxfp4``: the values of MXFP4.

The reference imports torch and the architectures. It shares no code with the trainer, the kernels,
the name tables and the engines, because it checks them.
"""
