"""Upcycling: a dense Llama or Qwen2.5 model as a GPT-OSS model that computes the same function.

Sparse upcycling (arXiv 2212.05055) makes every expert a copy of the dense MLP. The weights of a
token's experts sum to 1, so any routing gives the dense output. GPT-OSS's activation equals the
dense one, after a change of scales:

    GPT-OSS:  min(gate', 7) * sigmoid(1.702 * gate') * (clamp(up', -7, 7) + 1)
    dense:    gate * sigmoid(gate) * up

    gate' = gate / 1.702,   up' = scale * up - 1,   down' = 1.702 / scale * down

The two models are equal where no clamp is reached. ``scale`` is chosen per channel so that ``up``
stays within its clamp. The clamp of ``gate`` cannot be moved, because the sigmoid is not linear.

Sinks, windows and noise on the experts change the function. ``UpcycleReport`` has the difference in
loss.
"""
