"""The kernel of a cross-entropy in Triton: from rows of logits to their statistics, and to their gradient.

A row is read twice, the second time from its end, of which the caches still hold most. The gradient may take the place
of the logits: what is read of a row but once, the label's logit, is read first.

Source: the running sums: Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def rows_of_logits(
    logits_ptr, labels_ptr, scale_ptr, bias_ptr, top_ptr, exps_ptr, picked_ptr, total_ptr, grad_ptr, spec: tl.constexpr
):
    """Largest logit, sum of exponentials less it, the label's logit and the sum of one row, and its gradient."""
    block: tl.constexpr = spec.block
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    logits_ptr += row.to(tl.int64) * spec.vocab
    inside = (label >= 0) & (label < spec.vocab)
    place = tl.where(inside, label, 0)
    tl.store(picked_ptr + row, tl.where(inside, _logits(logits_ptr, bias_ptr, place, 0.0, spec), 0.0))
    columns = tl.arange(0, block)
    top = tl.full((), -float("inf"), tl.float32)
    exps, totals = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    for first in range(0, spec.vocab, block):
        logits = _logits(logits_ptr, bias_ptr, first + columns, -float("inf"), spec)
        greater = tl.maximum(top, tl.max(logits, 0))
        finite = tl.where(greater == -float("inf"), 0.0, greater)
        exps = exps * tl.exp(top - finite) + tl.exp(logits - finite)
        if spec.smoothing > 0:
            totals += tl.where(first + columns < spec.vocab, logits, 0.0)
        top = greater
    finite = tl.where(top == -float("inf"), 0.0, top)
    sum_of_exps = tl.sum(exps, 0)
    tl.store(top_ptr + row, top)
    tl.store(exps_ptr + row, sum_of_exps)
    tl.store(total_ptr + row, tl.sum(totals, 0))
    if spec.want_gradient:
        scale = tl.load(scale_ptr + row)
        by_exp = scale / sum_of_exps
        if spec.z_loss > 0:
            by_exp *= 1 + 2 * spec.z_loss * (finite + tl.log(sum_of_exps))
        grad_ptr += row.to(tl.int64) * spec.vocab
        for done in range(0, spec.vocab, block):
            at = (spec.vocab - 1) // block * block - done + columns
            logits = _logits(logits_ptr, bias_ptr, at, 0.0, spec)
            grad = tl.exp(logits - finite) * by_exp
            grad -= tl.where(at == label, (1 - spec.smoothing) * scale, 0.0)
            if spec.smoothing > 0:
                grad -= spec.smoothing / spec.vocab * scale
            if spec.soft_cap > 0:
                part = logits / spec.soft_cap
                grad *= 1 - part * part
            tl.store(grad_ptr + at, grad, at < spec.vocab)


@triton.jit
def _logits(logits_ptr, bias_ptr, at, other: tl.constexpr, spec: tl.constexpr):
    """Logits of some columns of a row."""
    logits = tl.load(logits_ptr + at, at < spec.vocab, other).to(tl.float32)
    if spec.has_bias:
        logits += tl.load(bias_ptr + at, at < spec.vocab, 0.0).to(tl.float32)
    if spec.soft_cap > 0:
        part = logits / spec.soft_cap
        size = tl.abs(part)
        exp = tl.exp(-2 * size)
        tanh = (1 - exp) / (1 + exp)
        tanh = tl.where(part < 0, -tanh, tanh)
        square = part * part  # near 0 the difference above has few digits
        small = part * (1 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
        logits = tl.where(at < spec.vocab, spec.soft_cap * tl.where(size < 0.2, small, tanh), other)
    return logits
