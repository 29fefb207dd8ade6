"""A table of operations on logits, one in each line, with the kind of result on lazy logits.

test_operations.py runs each line alone. tests/search/lazy.py draws the lines of its programs from the table.

The first word of a line is the kind of its result for a model's logits of 2 x 4 tokens and 13 classes:

* ``lazy``: lazy logits; if the line has no result, the logits are still lazy
* ``loss``: a result that is computed without logits in memory, and counted as fused: a loss, or values with a gradient
* ``value``: another tensor that is computed without logits in memory
* ``real``: the line computes all logits

The search draws a value for each placeholder in braces. `FILLINGS` has the values for lines that run alone:

* ``x``: a tensor of floating-point numbers, of one dimension at least
* ``g``: the same with two dimensions at least, of which the last has two entries or more
* ``l``: a tensor of 2 x 4 x 13
* ``o``: another tensor of the shape of ``x``, ``g`` or ``l``, of any of the models
* ``y``, ``z``: a new name, or sometimes an existing one
* ``loss``: a new name, for a result that is differentiated at the end
* ``n``: a number
* ``inf``: a number for masking
* ``d``, ``e``: a dimension; ``p``: all dimensions in another order
* ``i``: an index in dimension ``d``; ``i0``: one in the first
* ``s``: a slice; ``c``: an index of a class
* ``t``: a dtype
* ``part``: ``g`` or ``o``, divided by a temperature, detached, or cast; ``logp``, ``logq``: its log-probabilities;
  ``probs``: its probabilities

`note` records results that are not tensors. `fuzz.Run` defines the other functions.
"""

from __future__ import annotations

from typing import NamedTuple

VIEWS = """
lazy  {y} = {x}.view(-1, {x}.shape[-1])
lazy  {y} = {x}.view({x}.shape)
real  {y} = {x}.view(-1)
lazy  {y} = {l}.view(8, -1)
real  {y} = {l}.view(2, 52)
lazy  {y} = {l}.view(torch.Size([4, 2, 13]))
lazy  {y} = {x}.reshape(-1, {x}.shape[-1])
lazy  {y} = {l}.reshape(1, 2, 4, 13)
lazy  {y} = {l}[:, :-1].reshape(-1, 13)
lazy  {y} = torch.reshape({l}, (-1, 13))
lazy  {y} = {x}.flatten(0, -2)
lazy  {y} = {l}.flatten(0, 1)
lazy  {y} = {l}[:, 1:].flatten(0, 1)
lazy  note({g}.flatten(0, -2) is {g})
real  {y} = {x}.flatten()
lazy  {y} = {x}.transpose({d}, {e})
real  {y} = {x}.permute({p})
lazy  {y} = {l}.transpose(0, 1)[1:]
real  {y} = {g}[0].T
lazy  {y} = {x}.unsqueeze({d})
real  {y} = {x}.unsqueeze(-1)
lazy  {y} = {x}.squeeze()
lazy  {y} = {x}.squeeze({d})
lazy  {y} = {l}[:1].squeeze(0)
lazy  {y} = {x}[None]
lazy  {y} = {l}[:, None]
lazy  {y} = {x}[{i0}]
lazy  {y} = {x}[-1]
lazy  {y} = {x}[torch.tensor({i0})]
lazy  {y} = {x}[{s}]
lazy  {y} = {x}[{s}]
lazy  {y} = {g}[:, {s}]
lazy  {y} = {l}[:, 1:3, :]
lazy  {y} = {l}[-1, 2:]
lazy  {y} = {x}[..., {s}]
lazy  {y} = {l}[..., :7]
lazy  {y} = {l}[:, 1:, 2:9]
lazy  {y} = {l}[1:, 1:]
lazy  {y} = {x}[..., {c}]
lazy  {y} = {x}[..., torch.tensor({c})]
lazy  {y} = {x}[..., {c}:{c} + 1]
lazy  {y} = {l}[0, 0, 5]
real  {y} = {l}[:1].select(-1, 5)
lazy  {y} = {g}[..., :-1, :]
lazy  {y} = {g}[:, -1]
lazy  {y} = {g}[..., -1, :]
lazy  {y} = {x}[...]
lazy  {y} = {x}[:]
real  {y} = {x}.narrow({d}, {i}, 1)
lazy  {y} = {l}.transpose(0, 1)
lazy  {y} = {x}.unbind({d})[{i}]
lazy  {y} = {x}.split(2, {d})[-1]
lazy  {y}, {z} = {x}.split([1, {x}.shape[{d}] - 1], {d})
lazy  {y}, {z} = torch.split({l}, [1, 3], dim=1)
lazy  {y} = {x}.chunk(2, {d})[0]
lazy  {y} = {x}.roll(1, {d})
lazy  {y} = torch.roll({l}, shifts=(1, 2), dims=(0, -2))
real  {y} = torch.roll({x}, 1)
lazy  {y} = torch.cat([{x}[:1], {x}[:-1]])
lazy  {y} = torch.cat(({l}[:, :1], {l}[:, 1:3], {l}[:, -1:]), dim=-2)
lazy  {y} = (lambda z: torch.concat([z[:1], z]))({l}.float() / noise((4, 1)).abs())
real  {y} = torch.cat([{x}[:1], {x}.clone()])
real  {y} = torch.cat([{x}.detach(), {x}])
real  {y} = torch.cat([noise({x}.shape), {x}])
lazy  {y} = next(iter({x}))
lazy  {y} = [row for row in {x}][-1]
"""

COPIES = """
lazy  {y} = {x}.detach()
lazy  {y} = {x}.detach()
lazy  {y} = {x}.data
lazy  {y} = {x}.clone()
lazy  {y} = {x}.clone()
lazy  {y} = {x}.detach().clone()
lazy  {y} = {x}.contiguous()
lazy  {y} = {l}.view(-1, 13).contiguous()
lazy  {y} = {g}[0].contiguous()
lazy  {y} = {l}[:, 1:].contiguous()
real  {y} = {l}.transpose(0, 1).clone()
lazy  {y} = {x}.float()
lazy  {y} = {l}[:, 1:].float()
lazy  {y} = {x}.double()
lazy  {y} = {x}.half()
lazy  {y} = {x}.bfloat16()
lazy  {y} = {x}.to({t})
lazy  {y} = {x}.to(dtype={t})
lazy  {y} = {x}.to({x}.dtype)
lazy  {y} = {x}.to({x}.dtype, copy=True)
lazy  {y} = {x}.to(copy=True, dtype={t}, device={x}.device)
lazy  {y} = {x}.to(torch.device('cpu'), {t})
lazy  {y} = {x}.to(noise(1).float())
value {y} = noise(1).float().to({x})
value {y} = noise(1).expand_as({x})
lazy  {y} = {x}.to('cpu')
lazy  {y} = {x}.cpu()
lazy  {y} = {x}[bits({x}.shape[:-1])]
real  {y} = {x}[bits({x}.shape)]
lazy  {y} = {x}[bits({x}.shape[:1])]
lazy  {y} = {x}[[0]]
lazy  {y} = {x}[torch.tensor([0])]
lazy  {y} = {x}[[0, -1]]
lazy  {y} = {x}[index({x}, 0)]
real  {y} = {l}[..., 5].sigmoid()
loss  {y} = {x}[..., index({x}, -1)]
loss  {y} = {x}[..., []]
lazy  {y} = {g}[:, index({g}, 1)]
loss  {y} = {g}[:, -1, [0, -1]]
loss  {y} = ({l} * 2)[:, -1, torch.tensor([3, 0], dtype=torch.int32)]
loss  {y} = {l}[1, :, torch.tensor([[1], [4]])]
real  {y} = {l}[:, None, ..., [2, 1], None][..., 0]
loss  {y} = {l}[bits((2, 4)), 5]
loss  {y} = {l}[torch.tensor([1]), 2, 5].squeeze(0)
loss  {y} = {l}[torch.tensor([1, 0]), torch.tensor([3, 2]), -1]
lazy  {y} = {l}[torch.tensor([0, 1, 1]), torch.tensor([3, 2, 2])]
loss  {y} = {l}[..., [0, 1, 2, 3]]
real  {y} = {l}[..., [0, 1, 2, 3, 4]]
lazy  {y} = {x}.index_select({d}, index({x}, {d}))
lazy  {y} = torch.index_select({l}, 1, torch.tensor([3, 0, 0], dtype=torch.int32))
real  {y} = {l}.transpose(1, 2) * {n}
real  {y} = {x}.flip({d})
real  {y} = copy.deepcopy({x}.detach())
real  {y} = copy.copy({x})
real  {y} = {x}.as_subclass(torch.Tensor)
real  {y} = pickle.loads(pickle.dumps({x}.detach()))
value {y} = torch.zeros_like({x})
value {y} = torch.ones_like({x})
value {y} = {x}.new_zeros({x}.shape)
value {y} = {x}.new_full((1,), 2.0)
lazy  {y} = ({l}[:, :-1, :10].float() / 2.0).contiguous().view(-1, 10)
"""

ARITHMETIC = """
lazy  {y} = {x} * {n}
lazy  {y} = {n} * {x}
lazy  {y} = {x} / {n}
real  {y} = {x} + {n}
real  {y} = {n} / {x}
lazy  {y} = -{x}
lazy  {y} = torch.mul({x}, {n})
lazy  {y} = torch.div({x}, {n})
real  {y} = {x} / 0
lazy  {y} = {x} * scalar({n})
lazy  {y} = {x} / scalar({n})
lazy  {y} = scalar({n}) * {x}
real  {y} = {x} + torch.arange({x}.shape[-1])
lazy  {y} = {x} + noise({x}.shape[-1:])
lazy  {y} = {x} + learned(noise({x}.shape[-1:]))
lazy  {y} = noise({x}.shape[-1:]) + {x}
lazy  {y} = noise({x}.shape[-1:]).float() + {x}
lazy  {y} = {x}.float() + noise({x}.shape[-1:])
lazy  {y} = torch.add({l} / 7.0, noise((13,)).view(1, 1, -1))
lazy  {y} = noise((13,)).view(1, -1) + {l}
real  {y} = {l} + noise((13,)).view(1, 1, 1, -1)
real  {y} = torch.add({x}, noise({x}.shape[-1:]), alpha=2)
real  {y} = {x} * noise({x}.shape[-1:])
real  {y} = {x} + noise({x}.shape[:-1]).unsqueeze(-1)
lazy  {y} = {x} - {x}.logsumexp(-1, keepdim=True)
lazy  {y} = ({x} - {x}.logsumexp(-1, keepdim=True)).float().log_softmax(-1)
lazy  {y} = {x}.detach() - {x}.logsumexp(-1, keepdim=True)
lazy  {y} = {x} - {x}.detach().logsumexp(-1, keepdim=True)
real  {y} = ({x}.log_softmax(-1) + row({x})).log_softmax(-1)
real  {y} = ({x} - learned(row({x}))).log_softmax(-1)
real  {y} = {x} * learned(scalar(1.3))
real  {y} = learned(scalar(2.0)) * torch.tanh({x} / learned(scalar(2.0)))
lazy  {y} = {x} + learned(noise({x}.shape[-1:])) * learned(scalar(1.3))
real  {y} = {x}.masked_fill(bits({x}.shape[-1:]), -5.0) * learned(scalar(1.3))
real  {y} = {x} + spike({x}, float('inf'))
real  {y} = {x} * noise({x}.shape[:-1]).unsqueeze(-1)
lazy  {y} = {x} / noise({x}.shape[:-1]).abs().unsqueeze(-1)
lazy  {y} = (3.0 * torch.tanh({l}) / noise((2, 1, 1)).abs())[1:].unbind(1)[2]
real  {y} = {x} / noise({x}.shape[:-1]).unsqueeze(-1)
real  {y} = {x} / noise({x}.shape[:-1]).abs().unsqueeze(-1).requires_grad_()
real  {y} = {x} + noise({x}.shape)
lazy  {y} = {x} + {o}
real  {y} = {x} - {o}
lazy  {y} = {x} + {o} * 0.7
lazy  {y} = {x} + {x}
lazy  {y} = torch.tanh({x} / {n}) * {n}
lazy  {y} = ({x} / 3.0).tanh() * -3.0 / 2.0
real  {y} = torch.tanh(torch.tanh({x}))
lazy  {y} = {x}.tanh()
real  {y} = {x}.sin()
real  {y} = {x}.clamp(-0.5, 0.5)
lazy  {y} = torch.clamp({x}, min=torch.finfo({x}.dtype).min)
real  {y} = {x}.masked_fill(bits({x}.shape[-1:]), {inf})
lazy  {y} = {x}.log_softmax(-1)
lazy  {y} = {x}.log_softmax(-1)
lazy  {y} = {x}.log_softmax(-1).clone()
lazy  {y} = {x}.log_softmax(-1)[bits({x}.shape[:-1])]
lazy  {y} = {x}.float().log_softmax(-1)
lazy  {y} = F.log_softmax({x}, -1)
lazy  {y} = torch.log_softmax(input={x}, dim=-1)
lazy  {y} = F.log_softmax({x}, dim=-1, dtype=torch.float64)
lazy  {y} = F.log_softmax(3.0 * torch.tanh({l} / 3.0), dim=-1, dtype=torch.float32)[:, 1:].half()
real  {y} = {x}.log_softmax(-1) * 2
lazy  {y} = -F.log_softmax({x}, dim=-1)
real  {y} = {x}.log_softmax(-1) + noise({x}.shape[-1:])
real  {y} = {x}.log_softmax(-1)[..., :4]
real  {y} = {x}.log_softmax({d})
lazy  {y} = {x}.softmax(-1)
lazy  {y} = {x}.softmax(-1)
real  {y} = {x}.softmax({d})
lazy  {y} = F.softmax({x}, -1, dtype=torch.float32)
lazy  {y} = torch.exp({x}.log_softmax(-1))
real  {y} = {x}.exp()
real  {y} = {x}.softmax(-1).log_softmax(-1)
lazy  {y} = {x}.softmax(-1) * {x}
lazy  {y} = {x}.log_softmax(-1) * {x}.softmax(-1)
real  {y} = {x}.softmax(-1) * {o}.log_softmax(-1)
real  {y} = ({x}.softmax(-1) * {o}).sum(-1)
real  {y} = {x}.detach().softmax(-1) * {x}
lazy  {y} = {x}.detach().softmax(-1) * {x}.detach().log_softmax(-1)
real  {y} = {x}.softmax(-1) / noise({x}.shape[:-1]).abs().unsqueeze(-1)
"""

REDUCTIONS = """
real  {y} = {x}.sum()
real  {y} = {x}.sum(-1)
loss  {y} = -({x}.softmax(-1) * {x}.log_softmax(-1)).sum(-1)
loss  {y} = (-({x} / 0.5).log_softmax(-1) * ({x} / 0.5).softmax(-1)).sum(dim=(-1,), keepdim=True)
loss  {y} = entropy({x})
loss  {y} = entropy({x}.float() / noise({x}.shape[:-1]).abs().unsqueeze(-1))
loss  {y} = {x}.logsumexp(-1) - torch.sum(F.softmax({x}, dim=-1) * {x}, dim=-1)
loss  {y} = {x}.logsumexp(-1) + entropy({x}.detach())
loss  {y} = {x}.detach().logsumexp(-1) + entropy({x})
real  {y} = (({x}.float() / -0.7).softmax(-1) * {x} * 2.0).sum(-1, dtype=torch.float64)
loss  {y} = Categorical(logits={x}, validate_args=True).entropy()
loss  {y} = Categorical(logits={x} / 2.0, validate_args=False).log_prob(chosen({x}).squeeze(-1))
lazy  {y} = Categorical(logits={x}).probs
real  {y} = ({x}.softmax(-1) * {x}.log_softmax(-1)).sum()
real  {y} = ({x} - {x}.logsumexp(-1, keepdim=True)).sum(-1)
loss  {y} = {x}.softmax(-1).gather(-1, few({x}))
value {y} = {x}.softmax(-1).argmax(-1)
real  {y} = ({x} - noise({x}.shape[:-1]).unsqueeze(-1)).gather(-1, few({x}))
loss  {y} = ({x} / noise({x}.shape[:-1]).abs().unsqueeze(-1)).log_softmax(-1).gather(-1, chosen({x}))
real  {y} = {x}.sum({d}, keepdim=True)
loss  {y} = (-F.log_softmax({x}, dim=-1)).sum(dim=-1, keepdim=True, dtype=torch.float32)
loss  {y} = {x}.mean()
loss  {y} = {x}.mean(-1)
loss  {y} = {x}.log_softmax(-1).mean(-1)
loss  {y} = (-F.log_softmax({x}, -1)).mean(dim=(-1,), keepdim=True, dtype=torch.float64)
loss  {y} = torch.mean({x}[:1].float() * {n} / noise({x}[:1].shape[:-1]).abs().unsqueeze(-1))
loss  {y} = ({x} - {x}.logsumexp(-1, keepdim=True)).mean(-1)
value {y} = {x}[:2].detach().mean()
value {y} = ({x}.detach().tanh() / {n}).mean(-1)
real  {y} = {x}.mean(0)
real  {y} = torch.clamp({x}, min=torch.finfo({x}.dtype).min).mean()
loss  {y} = {x}.logsumexp(-1)
real  {y} = ({x} + spike({x}, float('inf'))).logsumexp(-1)
real  {y} = {x}.masked_fill(bits({x}.shape[-1:]) | True, float('-inf')).logsumexp(-1)
real  {y} = {x}.logsumexp({d})
loss  {y} = ({x} * 3).float().logsumexp(dim=-1, keepdim=True)
loss  {y} = torch.stack([torch.logsumexp(row, dim=-1) for row in {g}])
value {y} = {x}.argmax(-1)
real  {y} = {x}.argmax({d})
value {y} = torch.argmax({x} / 2, dim=-1, keepdim=True)
value {y} = {x}.log_softmax(-1).argmax(-1)
real  {y} = {x}.max(-1).values
loss  {y} = {x}.gather(-1, chosen({x}))
loss  {y} = {x}.gather(-1, chosen({x})).squeeze(-1)
loss  {y} = {x}.gather(-1, few({x}))
loss  {y} = {x}.take_along_dim(few({x}), -1)
loss  {y} = torch.take_along_dim({x}.log_softmax(-1), indices=chosen({x}), dim=-1)
real  {y} = torch.take_along_dim({x}, chosen({x}))
loss  {y} = {x}.gather(-1, few({x})[..., :2])
loss  {y} = {x}.gather(-1, few({x})[..., :0])
loss  {y} = {x}.log_softmax(-1).gather(-1, chosen({x})).squeeze(-1)
loss  {y} = (-{x}.log_softmax(-1)).gather(-1, chosen({x}))
loss  {y} = (-{x}.log_softmax(-1)).gather(-1, few({x}))
loss  {y} = ({x} / 2.0).log_softmax(-1)[..., few({x}).flatten()[:2]]
loss  {y} = {x}.gather(-1, chosen({x}))[..., 0] - {x}.logsumexp(-1)
real  note(close({x}.gather(-1, chosen({x})), {x}))
real  note(close({x}.log_softmax(-1).gather(-1, chosen({x})), {x}.log_softmax(-1)))
real  {y} = {x} > 0
real  {y} = {x}.isnan().any()
"""

TOGETHER = """
real  {y} = torch.cat([{x}, {o}], {d})
"""

HEADS = """
lazy  {y} = b(ids)
lazy  {y} = b(ids)
lazy  {y} = a(ids.flip(0))
lazy  {y} = a(ids)
"""

# Changes of the models between call and loss, and operations on names.
MODELS = """
lazy  requires_grad(False, 'head')
lazy  requires_grad(False, 'head')
lazy  requires_grad(False)
lazy  requires_grad(True)
lazy  adapter(False)
lazy  adapter(True)
lazy  rescale_hidden({n})
lazy  rescale_hidden_data({n})
lazy  del {x}
"""

WRITES = """
real  {x}[0] = {n}
real  {x}[{s}] = {n}
real  {x}[..., {c}] = noise({x}.shape[:-1])
real  {x}[..., bits({x}.shape[-1:])] = {inf}
real  {x}[bits({x}.shape)] = {inf}
real  {x}[{x} < 0] = {n}
real  {x}[:] = {o}
real  {x}[{s}] *= {n}
real  {x}[{i0}] += {o}[{i0}]
real  {x}[:-1] = {x}[1:].clone()
lazy  note({x}.mul_({n}) is {x})
lazy  note({x}.add_(noise({x}.shape[-1:])) is {x})
real  note({x}.zero_() is {x})
real  note(F.relu({x}, inplace=True) is {x})
lazy  {y} = {x}.mul_({n})
lazy  {y} = {x}.mul_({n})
loss  {y} = {x}.tanh()[..., index({x}, -1)].mul_({n})
loss  {y} = {x}.gather(-1, chosen({x})).mul_({n})
loss  {y} = {x}.tanh().gather(-1, chosen({x})).mul_({n})
loss  {y} = {x}.log_softmax(-1).gather(-1, chosen({x})).mul_({n})
loss  {y} = {g}.log_softmax(-1)[:, -1, [0, -1]].mul_({n})
loss  {y} = {l}.tanh()[[1], :, 5].mul_({n})
loss  {y} = {l}.log_softmax(-1)[[1], :, 5].mul_({n})
real  {x}.mul_(noise({x}.shape[-1:]))
real  {y} = write_parts({g})
lazy  {y} = {x}.div_({n})
lazy  {x}.div_({n})
real  {y} = {x}.add_({n})
lazy  {x}.add_({o})
lazy  {y} = {x}.add_(noise({x}.shape[-1:]))
real  note({x}.tanh_() is {x})
real  {x}.masked_fill_(bits({x}.shape), {inf})
real  {y} = {x}.clamp_(-0.5, 0.5)
lazy  {y} = {x} * {n}; note({y}.detach_() is {y})
lazy  note({x}.view(-1, {x}.shape[-1]).mul_({n}).shape)
lazy  {x}.flatten(0, -2).div_({n})
lazy  {l}.view(8, 13).div_(noise((8, 1)).abs())
lazy  {x}.unsqueeze(0).mul_(scalar({n}))
lazy  {x}.view({x}.shape).add_(noise({x}.shape[-1:]))
real  {x}[{s}].mul_({n})
lazy  {x} *= {n}
lazy  {x} /= {n}
lazy  {x} += {o}
real  {x} += {n}
lazy  {x} += noise({x}.shape[-1:])
real  {x} -= noise({x}.shape[:-1]).unsqueeze(-1)
lazy  {x}.div_(noise({x}.shape[:-1]).abs().unsqueeze(-1))
real  {x} -= noise({x}.shape[-1:])
lazy  {x} *= scalar({n})
real  {x}.data.mul_({n})
real  {x}.detach().mul_({n})
"""

# Rarely used: other names for the same memory, and in-place changes of the shape of logits.
RARE = """
real  {x}.data = noise({x}.shape)
real  torch.mul({x}.detach(), {n}, out={x}.detach())
real  {x}.detach().numpy().fill({n})
real  {y} = F.dropout({x}, 0.5, training=False)
lazy  {y} = functools.reduce(lambda x, _: x * (0.5, 2.0)[_ % 2], range(500), {x})
lazy  {y} = functools.reduce(lambda x, _: x.view(x.shape)[:], range(250), {x})
lazy  {y} = torch.utils.checkpoint.checkpoint(lambda part: part.tanh() * 2, {x}, use_reentrant=False)
"""

READS = """
real  note({x}.isnan().any().item())
real  note({x}.detach().numpy())
lazy  note({x}.argmax(-1).tolist())
lazy  note(len({x}))
lazy  note({x}.shape, {x}.size(), {x}.size(-1), {x}.dim(), {x}.ndim, {x}.numel())
lazy  note(torch.numel({x}), {x}.device.type, {x}.dtype, {x}.nbytes, {x}.is_cuda, {x}.is_leaf, {x}.element_size())
real  note({x}.data_ptr() > 0)
lazy  note({x}.layout, {x}.is_sparse)
lazy  note({x}.is_floating_point(), torch.is_tensor({x}), isinstance({x}, torch.Tensor), hash({x}) == hash({x}))
lazy  note(torch.broadcast_tensors(chosen({x}), {x})[0])
real  {y} = torch.broadcast_tensors({x}, noise((2, *{x}.shape)))[0]
real  note({x}.grad_fn is None)
lazy  note(len({x}[:0].unbind(0)), len(list({x}[torch.zeros({x}.shape[:1], dtype=torch.bool)])))
lazy  note(flce.cross_entropy({g}, labels({g}), stats=('lse', 'logprob', 'entropy', 'argmax', 'correct'), shift=1)[1:])
real  note(tangent({x}))
"""

LOSSES = """
loss  {loss} = F.cross_entropy({g}.reshape(-1, {g}.shape[-1]), labels({g}).reshape(-1))
loss  {loss} = F.cross_entropy({g}.view(-1, {g}.shape[-1]), labels({g}).view(-1))
loss  {loss} = F.cross_entropy(input={g}.view(-1, {g}.shape[-1]), target=labels({g}).view(-1))
loss  {loss} = F.cross_entropy({g}.flatten(0, -2).float(), labels({g}).flatten())
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), reduction='sum')
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), reduction='none')
real  {loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), None, False)
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), chosen({g}).flatten(), ignore_index=3)
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), chosen({g}).flatten(), ignore_index=np.int64(3))
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), chosen({g}).flatten(), ignore_index=chosen({g}).flatten()[0])
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), label_smoothing=0.1)
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), label_smoothing=np.float32(0.1))
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), label_smoothing=False)
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten(), weight=noise({g}.shape[-1:]).abs())
loss  {loss} = F.cross_entropy({g}[-1], labels({g}[-1]), noise({g}.shape[-1:]).abs(), label_smoothing=0.2)
loss  {loss} = nn.CrossEntropyLoss()({g}.flatten(0, -2), labels({g}).flatten())
loss  {loss} = F.cross_entropy({l}.transpose(1, 2), labels({l}), reduction='none') * torch.arange(4)
loss  {loss} = nn.CrossEntropyLoss(noise((13,)).abs(), label_smoothing=0.1)({l}.transpose(2, 1), labels({l}))
loss  {loss} = F.nll_loss(({l} / {n}).log_softmax(-1).transpose(-1, -2), chosen({l})[..., 0], ignore_index=3)
loss  {loss} = F.cross_entropy({l}[0, 0], labels({l})[0, 0])
loss  {loss} = F.cross_entropy({g}[:, :-1].flatten(0, -2), labels({g}[:, :-1]).flatten())
loss  {loss} = F.cross_entropy({g}[:, :-1, :].contiguous().view(-1, {g}.shape[-1]), labels({g}[:, :-1]).view(-1))
loss  {loss} = F.cross_entropy({g}[-1], labels({g}[-1]))
loss  {loss} = F.cross_entropy({l}[..., :9].reshape(-1, 9), labels({l}[..., :9]).view(-1))
loss  {loss} = F.cross_entropy(({g} * 0.5 / 3).flatten(0, -2), labels({g}).flatten())
loss  {loss} = F.cross_entropy((torch.tanh({g} / 2.0) * 2.0).flatten(0, -2), labels({g}).flatten())
loss  {loss} = F.cross_entropy((torch.tanh(0.7 * {g} / 2.0) * -2.0 / 0.3).flatten(0, -2), labels({g}).flatten())
loss  {loss} = F.cross_entropy({g}[labels({g}) > 3], labels({g})[labels({g}) > 3])
loss  {loss} = F.cross_entropy({g}.flatten(0, -2), labels({g}).flatten() * 0 - 100, reduction='sum')
loss  {loss} = sum(F.cross_entropy(row, labels(row), reduction='sum') for row in {g}.flatten(0, -2).split(3))
loss  {loss} = F.cross_entropy(({g} * scalar(1.7)).flatten(0, -2), labels({g}).flatten())
loss  {loss} = F.cross_entropy(({g} * 0.3 + learned(noise({g}.shape[-1:]))).flatten(0, -2), labels({g}).flatten())
loss  {loss} = F.cross_entropy(({g} + {o} * 0.0).flatten(0, -2), labels({g}).flatten())
real  {loss} = F.cross_entropy(torch.clamp({g}, min=torch.finfo({g}.dtype).min).flatten(0, -2), labels({g}).flatten())
loss  {loss} = F.cross_entropy({g}.log_softmax(-1).flatten(0, -2), labels({g}).flatten(), label_smoothing=0.1)
real  {loss} = F.cross_entropy({g}.flatten(0, -2), noise({g}.shape).softmax(-1).flatten(0, -2))
loss  {loss} = F.nll_loss({g}.log_softmax(-1).flatten(0, -2), labels({g}).flatten())
loss  {loss} = F.nll_loss(F.log_softmax({g}, -1).view(-1, {g}.shape[-1]), labels({g}).view(-1), reduction='sum')
loss  {loss} = F.nll_loss(F.log_softmax({g}[-1], -1), chosen({g}[-1])[..., 0], noise({g}.shape[-1:]), ignore_index=3)
real  {loss} = F.nll_loss({g}.flatten(0, -2), labels({g}).flatten())
loss  {loss} = flce.cross_entropy({g} * 2, labels({g}))
loss  {loss} = flce.cross_entropy({g}, labels({g}), shift=1)
loss  {loss} = flce.cross_entropy({g} * 2, labels({g}), softcap=3.0, z_loss=1e-2, shift=1)
loss  {loss} = flce.cross_entropy({g} * 2, labels({g}), logit_scale=0.5, temperature=2.0, shift=2)
loss  {loss} = flce.cross_entropy({g} * 2, chosen({g})[..., 0], label_smoothing=0.1, reduction='sum', ignore_index=5)
loss  {loss} = flce.cross_entropy({g} * 2, labels({g}), inplace=True, shift=1)
loss  {loss} = flce.cross_entropy({g} * 2, labels({g}), weight=noise({g}.shape[-1:]).abs(), reduction='none') * 1.0
loss  {loss} = flce.cross_entropy({g} * 2, labels({g}), stats=('lse', 'entropy', 'argmax'), z_loss=1e-3, shift=1).loss
loss  {loss} = flce.CrossEntropyLoss(z_loss=1e-2)({g}, labels({g}), token_weight=learned(noise({g}.shape[:-1]).abs()))
real  {loss} = flce.cross_entropy({g}.log_softmax(-1), labels({g}), z_loss=0.1)
real  {loss} = flce.cross_entropy({g}.log_softmax(-1), labels({g}), stats=('lse', 'logprob')).loss
loss  {loss} = flce.cross_entropy({g}.log_softmax(-1), labels({g}), temperature=0.7, stats=('entropy',)).loss
loss  {loss} = loss_of({g})
loss  {loss} = -{g}.log_softmax(-1).gather(-1, chosen({g})).mean()
loss  {loss} = ({g}.logsumexp(-1) - {g}.gather(-1, chosen({g})).squeeze(-1)).mean()
loss  {loss} = {g}.logsumexp(-1).square().mean()
loss  {loss} = -({g}.softmax(-1) * {g}.log_softmax(-1)).sum(-1).mean()
loss  {loss} = (Categorical(logits={g}).log_prob(chosen({g}).squeeze(-1)) + 0.1 * entropy({g})).sum()
real  {loss} = F.cross_entropy(({g} - noise((1,))).flatten(0, -2), labels({g}).flatten())
real  {loss} = F.cross_entropy(({g} / noise((1,)).abs()).flatten(0, -2), labels({g}).flatten())
loss  {loss} = -F.logsigmoid(picked({g}).sum() - picked({o}).sum())
real  {loss} = {g}.log_softmax(-1).sum()
"""

# Of one or two models, which both train or not.
DIVERGENCES = """
loss  {loss} = ({probs} * ({logq} - {logp})).sum(-1).mean()
loss  {loss} = (({logp} - {logq}) * {probs}).sum()
real  {loss} = ({probs} * ({logp} - {logq})).mean()
loss  {loss} = -({probs} * {logp}).sum(-1).mean()
loss  {loss} = (-{logp} * {probs}).sum()
real  {loss} = {probs} * {part}
lazy  {y} = {probs} * ({logp} - {logq})
lazy  {y} = {probs} * {logp}
loss  {loss} = F.kl_div({logp}, {logq}, reduction='batchmean', log_target=True)
loss  {loss} = F.kl_div({logq}, {logp}, reduction='mean', log_target=True)
loss  {loss} = F.kl_div({logp}, {probs}, reduction='batchmean')
loss  {loss} = F.kl_div({logp}, {probs}, reduction='sum')
loss  {loss} = F.kl_div({logp}, {probs}, reduction='none').sum(-1)
lazy  {y} = F.kl_div({logp}, {logq}, reduction='none', log_target=True)
real  {loss} = F.kl_div({logp}, {part}, reduction='sum')
loss  {loss} = F.cross_entropy({part}.flatten(0, -2), {probs}.flatten(0, -2))
loss  {loss} = F.cross_entropy({logp}.flatten(0, -2), {probs}.flatten(0, -2), reduction='sum')
loss  {loss} = F.cross_entropy({part}.flatten(0, -2), {probs}.flatten(0, -2), reduction='none')
real  {loss} = F.cross_entropy({part}.flatten(0, -2), {probs}.flatten(0, -2), label_smoothing=0.1)
real  {loss} = F.cross_entropy({part}.flatten(0, -2), {probs}.flatten(0, -2), noise({g}.shape[-1:]).abs())
real  {loss} = F.cross_entropy({part}, {probs}, reduction='sum')
real  {loss} = F.cross_entropy({part}.flatten(0, -2), {part}.flatten(0, -2))
real  {loss} = ({logp} - {logq}).square().mean()
real  {loss} = ({probs} * ({logp} / 2)).sum(-1).mean()
"""

AUTOGRAD = """
lazy  {y} = Doubled.apply({x})
real  {y} = Squared.apply({x})
real  {y} = DoubledInPlace.apply({x})
real  {y} = TripledInPlace.apply({x})
lazy  {y} = Tripled.apply({x}, torch.clone)
lazy  {y} = Tripled.apply({x}, lambda x: x * 1.0)
value {y} = torch.utils.checkpoint.checkpoint(entropy, {x}, use_reentrant=True)
value {y} = torch.utils.checkpoint.checkpoint(lambda x: picked(x) + x.logsumexp(-1), {x}, use_reentrant=True)
real  {y} = custom_tanh({x})
real  {y} = torch.ops.flce_fuzz.tanh({x}.tanh() * 2)
real  {y} = torch.ops.flce_fuzz.tanh.default({x})
real  note(DoubledInPlace.apply({x}) is {x})
real  hook({x}, keep('{x}'))
real  hook({x}, keep('{x}'))
real  hook({x}, lambda gradient: gradient * 2)
real  retain({x})
real  {y} = {x}.detach().requires_grad_(); retain({y})
lazy  note({x}.requires_grad_() is {x})
"""

GROUPS = {
    "views": VIEWS,
    "copies": COPIES,
    "arithmetic": ARITHMETIC,
    "reductions": REDUCTIONS,
    "together": TOGETHER,
    "heads": HEADS,
    "models": MODELS,
    "writes": WRITES,
    "rare": RARE,
    "reads": READS,
    "losses": LOSSES,
    "divergences": DIVERGENCES,
    "autograd": AUTOGRAD,
}


class Operation(NamedTuple):
    """One line of the table."""

    group: str
    becomes: str
    code: str


OPERATIONS = [
    Operation(group, *line.split(maxsplit=1)) for group, lines in GROUPS.items() for line in lines.strip().splitlines()
]

FILLINGS = {
    "x": "lg",
    "g": "lg",
    "l": "lg",
    "o": "t9",
    "y": "t1",
    "z": "t2",
    "loss": "loss1",
    "n": "0.5",
    "inf": "-1e4",
    "d": "1",
    "e": "2",
    "i": "0",
    "i0": "1",
    "p": "2, 0, 1",
    "s": "1:",
    "c": "5",
    "t": "torch.float32",
    "part": "lg",
    "logp": "lg.log_softmax(-1)",
    "logq": "t9.detach().log_softmax(-1)",
    "probs": "t9.detach().softmax(-1)",
}
