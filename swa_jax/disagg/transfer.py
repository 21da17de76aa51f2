"""Moves bundles between processes by JAX's transfer server: the decode side pulls.

What is offered stays with the prefill side until it is pulled; control goes another way.
"""

from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from swa_jax.disagg.links import LinkError
from swa_jax.disagg.prefill_side import Parcel
from swa_jax.replay.trace_lines import show


def _start(host: str) -> Any:  # noqa: ANN401
    from jax.experimental import transfer  # not every build of JAX has it

    anywhere = f"{host}:0"
    return transfer.start_transfer_server(jax.local_devices()[0].client, anywhere, [anywhere])


class TransferSender:
    """The prefill side's end.

    Args:
      host: address of this machine as the decode side sees it.

    Attributes:
      address: what the decode side connects to.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Starts the server."""
        self._server = _start(host)
        self._device = SingleDeviceSharding(jax.local_devices()[0])
        self._count = 0
        self.address: str = self._server.address()

    def send(self, bundle: Parcel) -> int:
        """Offers a bundle, from one device whatever the layout here; its number."""
        self._count += 1
        leaves = jax.tree.leaves(jax.device_put(bundle, self._device))
        self._server.await_pull(self._count, leaves)
        return self._count


class TransferReceiver:
    """The decode side's end.

    Args:
      address: of the sender.
      sharding: where bundles go on this side once they are here; by default they stay on the
        first device.
      host: address of this machine as the prefill side sees it.
    """

    def __init__(
        self, address: str, *, sharding: Sharding | None = None, host: str = "127.0.0.1"
    ) -> None:
        """Connects."""
        self._server = _start(host)
        self._connection = self._server.connect(address)
        self._lands = SingleDeviceSharding(jax.local_devices()[0])
        self._sharding = sharding

    def fetch(self, offered: int, shape: Parcel) -> "Pulled":
        """Begins to pull a bundle of this shape."""

        def here(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._lands)

        if not isinstance(offered, int) or not 0 <= offered < 2**64:
            raise LinkError(f"a bundle has a number, got {show(offered)}")
        leaves, tree = jax.tree.flatten(shape)
        try:
            arrays = self._connection.pull(offered, [here(leaf) for leaf in leaves])
        except jax.errors.JaxRuntimeError as error:
            raise LinkError(f"bundle {offered} could not be pulled: {error}") from error
        return Pulled(jax.tree.unflatten(tree, arrays), self._sharding)


class Pulled:
    """A bundle that is being pulled."""

    def __init__(self, bundle: Parcel, sharding: Sharding | None) -> None:
        """It is on its way."""
        self._bundle, self._sharding = bundle, sharding

    def is_ready(self) -> bool:
        """All of it is here, or will never be."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves(self._bundle))

    def take(self) -> Parcel:
        """The bundle; LinkError where the sender has gone."""
        try:
            # What failed must not get into a program, where it would take the world with it.
            jax.block_until_ready(self._bundle)
        except jax.errors.JaxRuntimeError as error:
            raise LinkError(f"a bundle did not arrive: {error}") from error
        return (
            self._bundle if self._sharding is None else jax.device_put(self._bundle, self._sharding)
        )
