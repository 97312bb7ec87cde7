"""Digests of the kernels of a build: of what a GPU executes, and of nothing that has a name.

A kernel's digest covers its instructions, constants, registers, shared memory, parameters and
launch bounds. It leaves out symbol names, file names and the order of kernels. So two builds whose
sources differ in names and comments have equal digests.
"""

import hashlib
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from check_device_build import demangled, device_files
from check_machine_code import cuobjdump

TEXT = ".text."
NOBITS = 8  # a section that has a size and no bytes
PARAM_CBANK = 0x0A  # an attribute that begins with the index of a symbol
# Shared memory that the driver keeps. A kernel with no more has a section of this size or none,
# which depends on the other kernels of its file.
RESERVED = 1024
DATA_OF_FILE = re.compile(r"\.nv\.(global(\.init)?|constant\d+)")


class Section(NamedTuple):
    name: str
    size: int
    content: bytes


class Symbol(NamedTuple):
    name: str
    value: int
    size: int


def string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def read_sections(elf: bytes) -> list[Section]:
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + size * i) for i in range(count)]
    contents = [
        b"" if kind == NOBITS else elf[offset : offset + length]
        for _, kind, _, _, offset, length in headers
    ]
    return [
        Section(string(contents[names], header[0]), header[5], content)
        for header, content in zip(headers, contents, strict=True)
    ]


def read_symbols(sections: list[Section]) -> list[Symbol]:
    content = {section.name: section.content for section in sections}
    return [
        Symbol(string(content[".strtab"], name), value, size)
        for name, _, _, _, value, size in struct.iter_unpack("<IBBHQQ", content[".symtab"])
    ]


def attributes(info: bytes) -> list[tuple[int, bytes]]:
    """Of a section .nv.info: format, attribute and two bytes, which of format 4 are a length."""
    found, at = [], 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        end = at + 4 + (value if form == 4 else 0)
        found.append((attribute, info[at + 4 : end] if form == 4 else info[at + 2 : end]))
        at = end
    return found


def digests(cubin: bytes) -> dict[str, str]:
    """The digest of each kernel of a cubin, by its mangled name."""
    sections = read_sections(cubin)
    symbols = read_symbols(sections)
    (architecture,) = struct.unpack_from("<I", cubin, 48)
    of_file = next((s.content for s in sections if s.name == ".nv.info"), b"")
    found = {}
    for kernel in [s.name.removeprefix(TEXT) for s in sections if s.name.startswith(TEXT)]:
        parts: list[tuple] = [("architecture", architecture)]
        for section in sections:
            name, content = section.name.removesuffix(f".{kernel}"), section.content
            if name == section.name and not DATA_OF_FILE.fullmatch(name):
                continue
            if name == ".nv.info":
                parts += [(name, attribute, value[4:] if attribute == PARAM_CBANK else value)
                          for attribute, value in attributes(content)]  # fmt: skip
            elif name.startswith(".rela"):
                for offset, info, addend in struct.iter_unpack("<QQq", content):
                    target = symbols[info >> 32]
                    kind = info & 0xFFFFFFFF
                    parts.append((name, offset, kind, addend, target.value, target.size))
            elif name != ".nv.shared" or section.size != RESERVED:
                parts.append((name, section.size, content))
        # Registers and stack: a list of the file names each kernel by the index of its symbol.
        for attribute, value in attributes(of_file):
            if symbols[int.from_bytes(value[:4], "little")].name == kernel:
                parts.append(("of file", attribute, value[4:]))
        text = "\n".join(sorted(map(repr, parts)))
        found[kernel] = hashlib.sha256(text.encode()).hexdigest()[:32]
    return found


def kernels(build: Path) -> dict[str, str]:
    """The digest of each kernel of a build, by its file and name."""
    program, found = cuobjdump(), {}
    for file, machine_code in device_files(build):
        with tempfile.TemporaryDirectory() as folder:
            command = [program, "-xelf", "all", machine_code.resolve()]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            for cubin in Path(folder).iterdir():
                for name, digest in digests(cubin.read_bytes()).items():
                    found[f"{file}: {demangled(name)}"] = digest
    if not found:
        sys.exit(f"machine_code: {build} has no kernels: configured with SONICMOE_CUDA=OFF?")
    return found
