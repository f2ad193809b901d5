# SPDX-License-Identifier: Apache-2.0
"""Boots a small Linux in the Bochs emulator that runs tests of a build and powers off.

Called by bochs.sh, which installs what this needs.
"""

import argparse
import gzip
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

SOURCE = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77  # SKIP_RETURN_CODE of all tests

INIT = """#!/bin/sh
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
ln -s /proc/self/fd /dev/fd
sh /tests.sh
echo FA2_END
sync
sleep 3
poweroff -f
"""

# Bochs 2.7 tells another size of the extended state than its XSAVEC and XSAVES (321, 323) write, and Linux would give
# up AVX over it.
KERNEL_ARGUMENTS = ("console=ttyS0 quiet nokaslr mitigations=off lpj=1000000 no_timer_check random.trust_cpu=on "
                    "clearcpuid=321,323")

BOCHSRC = """config_interface: textconfig
display_library: rfb, options="timeout=0"
cpu: model={cpu}, count=1, ips=100000000, reset_on_triple_fault=0
memory: guest=2048, host=2048
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path={image}, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={serial}
log: {log}
clock: sync=none
"""


def run(*command, **options):
    return subprocess.run(command, check=True, **options)


def list_tests(build, pattern):
    """The tests as ctest has them: name, command, environment, working directory."""
    listed = run("ctest", "--test-dir", build, "--show-only=json-v1", "-R", pattern, capture_output=True)
    tests = []
    for test in json.loads(listed.stdout)["tests"]:
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        tests.append((test["name"], test["command"], properties.get("ENVIRONMENT", []),
                      properties.get("WORKING_DIRECTORY", "/")))
    if not tests:
        sys.exit(f"bochs.py: no test of {build} matches '{pattern}'")
    return tests


def fetch_kernel(folder):
    """Debian's kernel for virtual machines, unpacked and not installed."""
    found = sorted(folder.glob("boot/vmlinuz-*"))
    if not found:
        depends = run("apt-cache", "depends", "linux-image-cloud-amd64", capture_output=True, text=True).stdout
        package = re.search(r"Depends: (linux-image-\S+)", depends).group(1)
        folder.mkdir(parents=True, exist_ok=True)
        run("apt-get", "-qq", "-o", "APT::Sandbox::User=", "download", package, cwd=folder)
        run("dpkg-deb", "-x", next(folder.glob("*.deb")).name, ".", cwd=folder)
        found = sorted(folder.glob("boot/vmlinuz-*"))
    return found[-1]


def make_root(root, tests):
    """The first and only file system: busybox, the tests with their libraries and data, where they are here."""
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("bin", "dev", "proc", "sys", "tmp"):
        (root / folder).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin")
    for name in ("echo", "env", "ln", "mount", "poweroff", "sh", "sleep", "sync"):
        (root / "bin" / name).symlink_to("busybox")

    def place(path, strip=False):
        to = root / os.path.relpath(path, "/")
        to.parent.mkdir(parents=True, exist_ok=True)
        if strip:
            run("strip", "-o", to, path)
        else:
            shutil.copy(path, to)

    handed_on = [f"{name}={value}" for name, value in os.environ.items()
                 if name in ("GTEST_FILTER", "FA2_TEST_FEW_CASES", "FA2_TEST_SEED")]
    script = []
    for name, command, environment, folder in tests:
        program = command[0]
        place(program, strip=True)
        libraries = run("ldd", program, capture_output=True, text=True).stdout
        for library in set(re.findall(r"/\S+", libraries)):
            place(library)
        (root / os.path.relpath(folder, "/")).mkdir(parents=True, exist_ok=True)
        # The dynamic linker's stubs would use XSAVEC.
        words = ["env", "LD_BIND_NOW=1", *handed_on, *environment, *command]
        script.append(f"cd {shlex.quote(folder)}\n{shlex.join(words)}\necho FA2_RESULT {shlex.quote(name)} $?\n")
    data = SOURCE / "tests/data"
    shutil.copytree(data, root / os.path.relpath(data, "/"), dirs_exist_ok=True)
    (root / "tests.sh").write_text("".join(script))
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)


def make_image(work, kernel):
    disk = work / "disk"
    (disk / "isolinux").mkdir(parents=True, exist_ok=True)
    files = run("find", ".", cwd=work / "root", capture_output=True).stdout
    archive = run("cpio", "-o", "-H", "newc", "--quiet", cwd=work / "root", input=files, capture_output=True).stdout
    (disk / "initrd.gz").write_bytes(gzip.compress(archive, 1))
    shutil.copy(kernel, disk / "vmlinuz")
    shutil.copy("/usr/lib/ISOLINUX/isolinux.bin", disk / "isolinux")
    shutil.copy("/usr/lib/syslinux/modules/bios/ldlinux.c32", disk / "isolinux")
    (disk / "isolinux/isolinux.cfg").write_text(
        f"default fa2\nprompt 0\nlabel fa2\n kernel /vmlinuz\n append initrd=/initrd.gz {KERNEL_ARGUMENTS}\n")
    image = work / "disk.iso"
    run("xorriso", "-as", "mkisofs", "-quiet", "-o", image, "-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat",
        "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table", disk, stderr=subprocess.DEVNULL)
    return image


def boot(work, image, cpu, seconds):
    """Prints the console as it grows; what it held at the end."""
    serial = work / "console.txt"
    serial.write_text("")
    rc = work / "bochsrc"
    rc.write_text(BOCHSRC.format(cpu=cpu, image=image, serial=serial, log=work / "bochs.log"))
    # Debian's Bochs starts in its debugger: "c" lets the machine run.
    bochs = subprocess.Popen(["bochs", "-q", "-f", rc], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    bochs.stdin.write(b"c\n")
    bochs.stdin.flush()
    end = time.monotonic() + seconds
    shown = 0
    try:
        while True:
            running = bochs.poll() is None
            text = serial.read_text(errors="replace")
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if not running or "FA2_END" in text:
                return text
            if time.monotonic() > end:
                sys.exit(f"bochs.py: not done after {seconds} s")
            time.sleep(1)
    finally:
        bochs.kill()
        bochs.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("pattern")
    parser.add_argument("--cpu", default="corei7_skylake_x")
    parser.add_argument("--seconds", type=int, default=3600)
    arguments = parser.parse_args()
    tests = list_tests(arguments.build, arguments.pattern)
    work = arguments.build.resolve() / "bochs"
    kernel = fetch_kernel(work / "kernel")
    make_root(work / "root", tests)
    text = boot(work, make_image(work, kernel), arguments.cpu, arguments.seconds)
    results = {name: int(code) for name, code in re.findall(r"FA2_RESULT (\S+) (\d+)", text)}
    skipped = [name for name, code in results.items() if code == SKIPPED]
    failed = [name for name, *_ in tests if results.get(name) not in (0, SKIPPED)]
    print(f"{len(tests) - len(failed) - len(skipped)} of {len(tests)} tests passed on {arguments.cpu}")
    if skipped:
        print("skipped: " + " ".join(skipped))
    if failed:
        sys.exit("bochs.py: these did not: " + " ".join(failed))


if __name__ == "__main__":
    main()
