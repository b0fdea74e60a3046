"""Keys and values of prompts that are kept for later prompts that begin alike."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import torch

from skipdecode.fastpath.model import layers_for_all_tokens

BLOCK_TOKENS = 16  # a multiple of `CHUNK_MULTIPLE` (skipdecode.engine.scheduler)


class PrefixCache:
    """Blocks of prompts, each with the keys and values of `BLOCK_TOKENS` tokens in all layers that the prompt ran.

    The key of a block is a hash of its tokens and of the key of the block before it, so it stands for everything that
    its keys and values depend on: all tokens up to its end, and the layers that they ran. It is a cryptographic hash,
    as prompts come from clients: nobody can make up a prompt that gets the blocks of another one.

    When memory is needed, the least recently used block goes first. A block counts as used after those that follow it,
    so a block never goes before those that are of no use without it.

    Attributes:
        max_bytes: maximum size of all blocks; 0 keeps nothing.
        nbytes: their size.

    Examples:
        >>> cache = PrefixCache(max_bytes=8)
        >>> keys = cache.keys([5] * 40, (0, 1), None)  # two blocks: at least the last token is always computed
        >>> cache.add(keys, 0, [torch.zeros(1), torch.ones(1)])
        >>> len(cache.blocks(keys, 0)), len(cache.blocks(cache.keys([5] * 17, (0, 1), None), 0)), cache.nbytes
        (2, 1, 8)
        >>> len(cache.blocks(cache.keys([5] * 40, (0,), None), 0))  # of other layers
        0
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._blocks: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self, prompt: Sequence[int], layers: Sequence[int], stop: int | None) -> list[bytes]:
        """The keys of a prompt's whole blocks, without its last token, whose logits are needed.

        Args:
            layers, stop: of the prompt, as `FastDecoder.prefill` takes them.
        """
        if not self.max_bytes:
            return []
        key = repr((tuple(layers), layers_for_all_tokens(layers, stop))).encode()
        keys = []
        for start in range(0, len(prompt) - BLOCK_TOKENS, BLOCK_TOKENS):
            key = hashlib.sha256(key + array("q", prompt[start : start + BLOCK_TOKENS]).tobytes()).digest()
            keys.append(key)
        return keys

    def blocks(self, keys: Sequence[bytes], first: int) -> list[torch.Tensor]:
        """The blocks with these keys, from the first-th on up to one that isn't held."""
        found = []
        for key in keys[first:]:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        if found:
            self._use(keys[: first + len(found)])
        return found

    def add(self, keys: Sequence[bytes], first: int, blocks: Sequence[torch.Tensor]) -> None:
        """Keep blocks of a prompt from the first-th on, as far as memory permits beside the blocks before them."""
        if first and keys[first - 1] not in self._blocks:
            return  # it has gone since: without it these are of no use
        self._use(keys[:first])
        own = set(keys[: first + len(blocks)])
        for key, block in zip(keys[first:], blocks, strict=False):
            if key in self._blocks:
                continue
            while self._blocks and self.nbytes + block.nbytes > self.max_bytes and next(iter(self._blocks)) not in own:
                self.nbytes -= self._blocks.popitem(last=False)[1].nbytes
            if self.nbytes + block.nbytes > self.max_bytes:
                break
            self._blocks[key] = block
            self.nbytes += block.nbytes
        self._use(keys[: first + len(blocks)])

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self.nbytes = 0

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)
