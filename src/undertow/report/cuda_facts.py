"""A script, run in a process of its own by `doctor`: the GPUs as the CUDA driver sees them, as JSON on standard output.

It needs nothing but the standard library and `libcuda`, makes no context, and ends with its process, so that the
asking process stays free of CUDA (and may still fork).
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

# Numbers of CUdevice_attribute in the driver's interface, which never change.
ATTRIBUTES = {"sms": 16, "copy_engines": 40, "major": 75, "minor": 76}


def check(code: int, what: str) -> None:
    if code != 0:
        raise SystemExit(f"{what} failed with CUDA error {code}")


def main() -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise SystemExit("no NVIDIA driver library (libcuda.so.1) is installed") from None
    code = driver.cuInit(0)
    if code == 100:  # CUDA_ERROR_NO_DEVICE: a driver without a card is an answer, not a failure
        print(json.dumps({"devices": [], "peer_access": []}))
        return
    check(code, "cuInit")
    count = ctypes.c_int()
    check(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    handles = []
    for ordinal in range(count.value):
        handle = ctypes.c_int()
        check(driver.cuDeviceGet(ctypes.byref(handle), ordinal), "cuDeviceGet")
        handles.append(handle)
    answer = {"devices": [describe(driver, handle) for handle in handles], "peer_access": peer_access(driver, handles)}
    print(json.dumps(answer))


def describe(driver: ctypes.CDLL, handle: ctypes.c_int) -> dict[str, Any]:
    name = ctypes.create_string_buffer(256)
    check(driver.cuDeviceGetName(name, len(name), handle), "cuDeviceGetName")
    memory = ctypes.c_size_t()
    check(driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle), "cuDeviceTotalMem")
    facts: dict[str, Any] = {"name": name.value.decode(errors="replace"), "memory": memory.value}
    for key, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        check(driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle), f"cuDeviceGetAttribute({key})")
        facts[key] = value.value
    facts["compute_capability"] = f"{facts.pop('major')}.{facts.pop('minor')}"
    return facts


def peer_access(driver: ctypes.CDLL, handles: list[ctypes.c_int]) -> list[list[bool]]:
    """Row i, column j: whether GPU i can address the memory of GPU j."""
    rows = []
    for mine in handles:
        row = []
        for theirs in handles:
            answer = ctypes.c_int(1)
            if mine is not theirs:
                check(driver.cuDeviceCanAccessPeer(ctypes.byref(answer), mine, theirs), "cuDeviceCanAccessPeer")
            row.append(bool(answer.value))
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
