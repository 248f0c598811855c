"""Host families: equal hosts in any number, where some numbers are sold under a name."""

from typing import Literal

from pydantic import Field

from windlass.document import Document
from windlass.schema import Link, Machine, Source, Tier


class HostFamily(Document):
    """Equal hosts of equal devices, or one host of 1 to n devices; `NAME:N` is N of them."""

    name: str
    device: str
    """Name of the single-device machine that describes each device."""
    devices_per_host: int = Field(ge=1)
    max_hosts: int = Field(ge=1)
    counts: Literal["hosts", "devices"] = "hosts"
    """What N of `NAME:N` counts. `devices`: those of one host, 1 to `devices_per_host`."""
    named_sizes: dict[str, int] = Field(default_factory=dict)
    """Product name -> number of hosts that it has."""
    tiers: tuple[Tier, ...] = ()
    """Offload tiers of a device in these hosts; they replace the tiers of the same name in the
    device's own file."""
    links: tuple[Link, ...]
    """Innermost first, for the largest number of hosts."""
    stragglers: float | None = None
    """As `Machine.stragglers`; None if no runs on such hosts were published."""
    source: str
    date: str
    sources: dict[str, Source]

    @property
    def max_count(self) -> int:
        """The largest N of `NAME:N`."""
        return self.max_hosts if self.counts == "hosts" else self.devices_per_host

    @property
    def default_count(self) -> int:
        """The N of `NAME` alone: one whole host."""
        return 1 if self.counts == "hosts" else self.devices_per_host

    def machine(self, number: int, device: Machine, name: str) -> Machine:
        """The machine with this number of hosts, or of devices in its one host.

        A link joins at most all devices of the machine. A link that joins no more devices than the
        link inside it is left out.

        Args:
            number: number of what the family counts, 1 to `max_count`.
            device: the single-device machine that the field `device` names.
        """
        per_host = self.devices_per_host if self.counts == "hosts" else number
        hosts = number if self.counts == "hosts" else 1
        count = hosts * per_host
        links: list[Link] = []
        for link in self.links:
            joins = min(link.joins, count)
            if joins > (links[-1].joins if links else 1):
                links.append(link.model_copy(update={"joins": joins}))
        device_memory, *offload_tiers = device.device.tiers
        replaced = {tier.name for tier in self.tiers}
        kept = tuple(tier for tier in offload_tiers if tier.name not in replaced)
        tiers = (device_memory, *self.tiers, *kept)
        return device.model_copy(
            update={
                "name": name,
                "hosts": hosts,
                "devices_per_host": per_host,
                "device": device.device.model_copy(update={"tiers": tiers}),
                "links": tuple(links),
                "stragglers": self.stragglers,
                "source": self.source,
                "date": self.date,
                "sources": {**device.sources, **self.sources},
            }
        )
