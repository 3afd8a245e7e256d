"""Layers whose forward runs again in backward: their arguments, their module's state, the account.

[Note: recomputed layers] A recomputed layer runs under torch's non-reentrant checkpoint, which
saves the layer's inputs and none of what the operations inside it save. The inputs are saved under
ebbtide's hooks, so they are kept, offloaded and prefetched like any saved tensor. The first time
that backward needs something from inside the layer, the checkpoint reads the inputs and runs the
forward again. What that saves is read soon, so it stays on the device, under the checkpoint's
hooks.
"""
