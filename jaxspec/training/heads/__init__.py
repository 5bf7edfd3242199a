"""Training of draft heads: blocks at sampled anchors, as a draft that begins there reads them.

The frozen target runs in the same program, one pass over the dialogues. A KV head reads its last
layer's keys and values (AASD's Target-Draft attention, section 3.3), an assistant those of its last
layer of each kind. An EAGLE head reads hidden states, and then its own: EAGLE-3's training-time
test, at A anchors of a row instead of all its tokens. A DFlash head reads hidden states and masks.
All learn the target's distributions at the blocks' tokens. Step s of a block at anchor a reads the
same slots in training as in decoding once the tokens before are accepted.
"""
