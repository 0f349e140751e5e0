/* Stands before libc in a process (LD_PRELOAD): perf_event_open answers for a machine that has energy events and cycle
 * counters, whatever this one has. All other system calls go on to the kernel.
 *
 * Of a process only its first thread works. State is read anew at every open from the text file that FAKE_PERF names, one "key value" a line:
 *
 *   refuse 0          errno of every open
 *   refuse_kernel 0   errno of an open that wants the kernel's cycles too
 *   watts 50          power behind the energy events (PMU type 18) of event 2; event E has watts * E / 2
 *   cycles_ghz 2      speed of the cycle counters (type 0)
 *   on_hardware 1     part of the time for which a cycle counter was on the hardware; counts are of that part
 *
 * Time is what FAKE_PERF_NOW_S of the environment says, where it says it, else CLOCK_MONOTONIC.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_COUNTERS = 4096, POWER_PMU = 18, EXCLUDE_KERNEL = 1 << 5 };

struct attributes { uint32_t type, size; uint64_t config, period, sample, format, flags; };
struct counter { int is_open, is_idle; uint32_t type; uint64_t config; double since_s; };

static struct counter counters[MOST_COUNTERS];

static double state(const char *wanted, double fallback)
{
    const char *path = getenv("FAKE_PERF");
    FILE *file = path ? fopen(path, "r") : NULL;
    char key[32];
    double value, found = fallback;
    if (!file)
        return fallback;
    while (fscanf(file, "%31s %lf", key, &value) == 2)
        if (strcmp(key, wanted) == 0)
            found = value;
    fclose(file);
    return found;
}

static double now_s(void)
{
    struct timespec now;
    const char *stepped_s = getenv("FAKE_PERF_NOW_S");
    if (stepped_s)
        return atof(stepped_s);
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static long open_counter(const struct attributes *wanted, int task)
{
    int refusal = (int)state("refuse", 0);
    if (refusal == 0 && !(wanted->flags & EXCLUDE_KERNEL))
        refusal = (int)state("refuse_kernel", 0);
    if (refusal == 0 && wanted->size != 64)
        refusal = E2BIG;
    int descriptor = refusal ? -1 : open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (descriptor < 0 || descriptor >= MOST_COUNTERS) {
        errno = refusal ? refusal : EMFILE;
        return -1;
    }
    counters[descriptor] = (struct counter){1, task > 0 && task != getpid(), wanted->type, wanted->config, now_s()};
    return descriptor;
}

long syscall(long number, ...)
{
    static long (*next)(long, ...);
    va_list rest;
    long a[6];
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_perf_event_open)
        return open_counter((const struct attributes *)a[0], (int)a[1]);
    if (!next)
        next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

ssize_t read(int descriptor, void *buffer, size_t size)
{
    static ssize_t (*next)(int, void *, size_t);
    if (!next)
        next = (ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read");
    if (descriptor < 0 || descriptor >= MOST_COUNTERS || !counters[descriptor].is_open || size < 24)
        return next(descriptor, buffer, size);
    const struct counter *counter = &counters[descriptor];
    double passed_s = counter->is_idle ? 0 : now_s() - counter->since_s, part = 1, value;
    if (counter->type == POWER_PMU) {
        /* The scale in sysfs is 2^-32 J. */
        value = state("watts", 50) * (double)counter->config / 2 * passed_s * 4294967296.0;
    } else {
        part = state("on_hardware", 1);
        value = state("cycles_ghz", 2) * 1e9 * passed_s * part;
    }
    uint64_t answer[3] = {(uint64_t)value, (uint64_t)(passed_s * 1e9), (uint64_t)(passed_s * part * 1e9)};
    memcpy(buffer, answer, sizeof answer);
    return sizeof answer;
}

int close(int descriptor)
{
    static int (*next)(int);
    if (!next)
        next = (int (*)(int))dlsym(RTLD_NEXT, "close");
    if (descriptor >= 0 && descriptor < MOST_COUNTERS)
        counters[descriptor].is_open = 0;
    return next(descriptor);
}
