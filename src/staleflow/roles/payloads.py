"""Where every prompt and payload lies, as rank 0 knows it, and the messages that start, move and free them.

A trajectory's payload is partial on the node that it came back to (`holder`), or whole where it was finished
(`generated`), and may have been copied to others on its way (`copies`); an instance's own part is not listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from staleflow.checkpoint.recovery import Resume
from staleflow.coordination.types import Command
from staleflow.data.prompts import Prompt
from staleflow.roles import messages as m
from staleflow.roles.batching import Generated
from staleflow.trajectories.schema import group_and_member

Plain = tuple[str, int, int, list[int], int]


class Payloads:
    """`send(node, message)`; `node_of_instance` for commands. Evaluation work is held here like any other."""

    def __init__(self, node_of_instance: Mapping[int, int], send: Callable[[int, m.ToHost], None]) -> None:
        self._node_of_instance, self._send = node_of_instance, send
        self.prompt_of: dict[int, Prompt] = {}  # live groups
        self.known_on: dict[int, set[int]] = {}  # group -> nodes that have its prompt
        self.generated: dict[int, Generated] = {}
        self.rewards: dict[int, float] = {}
        self.holder: dict[int, int] = {}  # tid -> node with a partial payload
        self.copies: dict[int, set[int]] = {}  # tid -> nodes that were sent a copy of its payload

    def restore(
        self, resume: Resume, prompt: Callable[[int], Prompt], unrewarded: Sequence[int], nodes: Sequence[int]
    ) -> None:
        """Take over what an earlier attempt has left, and tell the host of every node what to load of it."""
        self.prompt_of.update((group_id, prompt(index)) for group_id, index in resume.prompt_of.items())
        for tid, one in resume.kept.items():
            group_id, member = group_and_member(tid)
            self.known_on.setdefault(group_id, set()).add(one.node)
            if one.generated:
                self.generated[tid] = Generated(one.prompt_tokens, one.tokens, one.segments, one.finish, one.node)
            elif one.tokens:
                self.holder[tid] = one.node
            if resume.members[group_id][member][1] and one.reward is not None:
                self.rewards[tid] = one.reward
        for node in nodes:
            known = [self.prompt_message(g) for g, holders in self.known_on.items() if node in holders]
            self._send(node, m.Reload(known, [tid for tid in unrewarded if resume.kept[tid].node == node]))

    # ---- to the instances --------------------------------------------------------------------------------------------

    def command(self, commands: Sequence[Command]) -> None:
        """Send commands to their hosts, with what these need to carry them out."""
        by_node: dict[int, list[Plain]] = {}
        prompts: dict[int, dict[int, m.PromptMessage]] = {}
        for command in commands:
            node = self._node_of_instance[command.instance]
            plain = m.plain_command(command)
            by_node.setdefault(node, []).append(plain)
            if plain[0] == "Route":
                for tid in plain[3]:
                    self._bring(tid, node, prompts.setdefault(node, {}))
        for node, plains in by_node.items():
            self._send(node, m.Commands(plains, list(prompts.get(node, {}).values())))

    def _bring(self, tid: int, node: int, prompts: dict[int, m.PromptMessage]) -> None:
        """What the node needs before it can start `tid`: its prompt, or its partial payload."""
        group_id = group_and_member(tid)[0]
        known = self.known_on.setdefault(group_id, set())
        if node not in known:
            known.add(node)
            prompts[group_id] = self.prompt_message(group_id)
        holder = self.holder.get(tid)
        if holder is not None and holder != node:
            self._send(holder, m.Forward([tid], node))

    def prompt_message(self, group_id: int) -> m.PromptMessage:
        p = self.prompt_of[group_id]
        return m.PromptMessage(group_id, p.token_ids.tobytes(), p.text, p.reference, p.index)

    # ---- to the trainers ---------------------------------------------------------------------------------------------

    def collect(self, node: int, tids: Sequence[int]) -> None:
        """Payloads that lie on other nodes come to the trainer's node first."""
        elsewhere: dict[int, list[int]] = {}
        for tid in tids:
            if (holder := self.generated[tid].node) != node:
                elsewhere.setdefault(holder, []).append(tid)
        for holder, wanted in elsewhere.items():
            self._send(holder, m.Forward(wanted, node))

    def copied(self, tid: int, node: int) -> None:
        """A payload has been forwarded to this node."""
        self.holder[tid] = node
        self.copies.setdefault(tid, set()).add(node)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def forget(self, tids: Sequence[int], lives: Callable[[int], bool]) -> dict[int, Prompt]:
        """These payloads go, and the metadata with them. Returns the prompts of groups that do not live any more."""
        if not tids:
            return {}
        groups = sorted({group_and_member(tid)[0] for tid in tids})
        over = [group_id for group_id in groups if not lives(group_id)]
        for node in self._nodes_with(tids, groups):
            self._send(node, m.Forget(list(tids), over))
        for tid in tids:
            for held in (self.generated, self.rewards, self.holder, self.copies):
                held.pop(tid, None)
        for group_id in over:
            self.known_on.pop(group_id, None)
        return {group_id: self.prompt_of.pop(group_id) for group_id in over if group_id in self.prompt_of}

    def _nodes_with(self, tids: Sequence[int], groups: Sequence[int]) -> set[int]:
        nodes = {node for group_id in groups for node in self.known_on.get(group_id, ())}
        nodes |= {node for tid in tids for node in self.copies.get(tid, ())}
        nodes |= {self.generated[tid].node for tid in tids if tid in self.generated}
        return nodes | {self.holder[tid] for tid in tids if tid in self.holder}
