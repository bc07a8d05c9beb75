"""One PPO and one double-DQN update in PyTorch, eager or in a CUDA graph, as LeanRL runs them.

In the shapes, B is the batch and C the replay's capacity.
"""

import torch
from torch import nn
from torch.nn import functional

from bench.peers import workload
from bench.peers.mlp_torch import network
from bench.peers.torch_work import TorchWork

VARIANTS = {
    "original": {},
    "fresh gradients": {"form": "fresh_gradients"},
    "bf16 weights": {"form": "bf16_weights"},
    "bf16 weights, compiled loss": {"form": "bf16_weights", "compiled": True},
}


class Model:
    """The workload's network run in bf16, with float32 master weights.

    By default autocast converts every weight in every pass. With `bf16_weights` the network holds
    bf16 copies, which `refresh` renews from the master by one multi-tensor copy.
    """

    def __init__(self, device, bf16_weights):
        self.device, self.bf16_weights = device, bf16_weights
        self.network = network(device)
        self.weights = self.master = list(self.network.parameters())
        if bf16_weights:
            self.master = [w.detach().clone().requires_grad_() for w in self.master]
            for weight in self.master:
                weight.grad = torch.zeros_like(weight)
            self.network.to(torch.bfloat16)
            self.weights = list(self.network.parameters())

    def forward(self, observation):
        """The 8 outputs in bf16, [B, 8]."""
        if self.bf16_weights:
            return self.network(observation.to(torch.bfloat16))
        with torch.autocast(self.device, torch.bfloat16):
            return self.network(observation)

    def gradients_to_master(self):
        """Widen the gradients of the bf16 weights, where there are any."""
        if self.bf16_weights:
            wide = [w.grad for w in self.master]
            torch._foreach_copy_(wide, [w.grad for w in self.weights])

    def refresh(self):
        """Renew the bf16 weights from the master, where there are any."""
        if self.bf16_weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.master)


class Update(TorchWork):
    """What both updates share: backward pass, Adam, and the forms they can take.

    Args:
        batch: B.
        device, mode: see `TorchWork`.
        form: "autocast" is the original. "fresh_gradients" drops the gradients before the
            backward pass in place of zeroing them: the pass then hands its results over where it
            would launch one addition a parameter. Inside a graph the memory is the graph's own,
            so addresses hold. "bf16_weights" does that too, and keeps bf16 copies of the weights
            in place of autocast's conversion of each weight in each pass; gradients are rounded
            to bf16 where autocast rounds them.
        compiled: compile the loss, its network passes and their backward with `torch.compile`,
            which fuses what is element by element. Adam is one fused kernel already.
        learning_rate, epsilon: Adam's.

    Attributes:
        model: its `master` list holds the float32 weights that Adam changes.
        loss: of the last update, a scalar on the device.
        flops: floating-point operations of the network, a backward pass as two forward passes.
    """

    def __init__(self, batch, device, mode, form, compiled, learning_rate, epsilon, seed):
        super().__init__(device, mode)
        if form not in ("autocast", "fresh_gradients", "bf16_weights"):
            raise ValueError(
                f"form must be 'autocast', 'fresh_gradients' or 'bf16_weights', got {form!r}"
            )
        self.batch, self.form, self.compiled = batch, form, compiled
        torch.manual_seed(seed)
        self.model = Model(device, form == "bf16_weights")
        on_gpu = device == "cuda"
        self.optimizer = torch.optim.Adam(
            self.model.master, lr=learning_rate, eps=epsilon, fused=on_gpu, capturable=on_gpu
        )
        self.loss = None
        self._loss = torch.compile(self._make_loss) if compiled else self._make_loss

    def _make_loss(self, *samples):
        """The loss of the samples, a scalar."""
        raise NotImplementedError

    def _learn(self, samples, max_norm=None):
        """One update from the samples."""
        if self.form == "autocast":
            self.optimizer.zero_grad(set_to_none=False)
        else:
            for weight in self.model.weights:
                weight.grad = None
        loss = self._loss(*samples)
        loss.backward()
        self.model.gradients_to_master()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.master, max_norm, foreach=True)
        self.optimizer.step()
        self.model.refresh()
        self.loss = loss.detach()


class PPOUpdate(Update):
    """One PPO minibatch: forward, clipped loss, backward, clip by norm, Adam.

    The minibatch is random and already gathered: float32 observations [B, 56] and five scalars a
    sample.
    """

    def __init__(self, batch, device="cuda", mode="graph", form="autocast", compiled=False, seed=0):
        settings = workload.PPO
        super().__init__(
            batch, device, mode, form, compiled, settings["lr"], settings["adam_eps"], seed
        )
        self.flops = 3 * batch * workload.FLOPS_FORWARD
        self.samples = (
            torch.randn(batch, workload.PADDED, device=device),
            torch.randint(0, workload.ACTIONS, (batch,), device=device),
            torch.full((batch,), -1.1, device=device),
            *(torch.randn(batch, device=device) for _ in range(3)),
        )

    def _make_loss(self, observation, action, old_log_probability, old_value, advantage, target):
        settings = workload.PPO
        clip = settings["clip"]
        outputs = self.model.forward(observation).float()
        log_probabilities = functional.log_softmax(outputs[:, : workload.ACTIONS], -1)
        value = outputs[:, workload.ACTIONS]
        log_probability = log_probabilities.gather(1, action[:, None])[:, 0]
        ratio = (log_probability - old_log_probability).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1 - clip, 1 + clip)
        policy_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
        near = old_value + (value - old_value).clamp(-clip, clip)
        value_loss = 0.5 * torch.max((value - target) ** 2, (near - target) ** 2).mean()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
        return policy_loss + settings["value"] * value_loss - settings["entropy"] * entropy

    def _work(self):
        self._learn(self.samples, workload.PPO["max_grad_norm"])


class DQNUpdate(Update):
    """One double-DQN update: a uniform batch from the replay, Huber loss, Adam, soft target.

    The replay holds bf16 observations [C, 56] and next observations, and three scalars a
    transition, all random.

    Attributes:
        target: the target network; its `master` list holds the float32 weights.
    """

    def __init__(
        self,
        batch,
        capacity=1 << 20,
        device="cuda",
        mode="graph",
        form="autocast",
        compiled=False,
        seed=0,
    ):
        settings = workload.DQN
        super().__init__(
            batch, device, mode, form, compiled, settings["lr"], settings["adam_eps"], seed
        )
        self.capacity = capacity
        self.flops = 5 * batch * workload.FLOPS_FORWARD
        self.target = Model(device, form == "bf16_weights")
        observations = {"device": device, "dtype": torch.bfloat16}
        self.replay = (
            torch.randn(capacity, workload.PADDED, **observations),
            torch.randint(0, workload.ACTIONS, (capacity,), device=device),
            torch.randn(capacity, device=device),
            torch.zeros(capacity, device=device),
            torch.randn(capacity, workload.PADDED, **observations),
        )

    def _make_loss(self, observation, action, reward, done, next_observation):
        with torch.no_grad():
            values = self.model.forward(next_observation)[:, : workload.ACTIONS]
            best = values.argmax(-1, keepdim=True)
            next_value = self.target.forward(next_observation).gather(1, best)[:, 0].float()
            wanted = reward + workload.DQN["gamma"] * (1 - done) * next_value
        outputs = self.model.forward(observation).float()
        value = outputs.gather(1, action[:, None])[:, 0]
        return functional.smooth_l1_loss(value, wanted, beta=workload.DQN["huber"])

    def _work(self):
        index = torch.randint(0, self.capacity, (self.batch,), device=self.device)
        self._learn([column[index] for column in self.replay])
        with torch.no_grad():
            torch._foreach_lerp_(self.target.master, self.model.master, workload.DQN["tau"])
        self.target.refresh()
