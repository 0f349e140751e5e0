/* Stands before libc in the processes of a fake phone (LD_PRELOAD): its clock, and its gauges.
 *
 * The clock is the machine's without its pauses, where FAKE_CLOCK names the file of `tests.fakes.held_clock`: time, the
 * uptime and sleeping go by it. Elsewhere it is the machine's.
 *
 * Whoever opens a gauge reads the value of its last update, which the time of opening alone decides. No thread renews
 * it, so none can be late. A gauge is a file called ...current_now whose text begins with
 *
 *   @ BEGUN_US UPDATE_US DRAWS          when its updates began, how far apart they are, the file of the phone's power
 *   FROM_US PER_WATT MORE FLICKERS      one line a setting: its value is watts * PER_WATT + MORE, and a flicker
 *
 * and a line of DRAWS is "FROM_US WATTS". Of the lines whose time has come at an update, the last one holds: a program
 * may write now when its power will end, and a later one overrides it. Times are of the phone's CLOCK_REALTIME, which
 * its shells have.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { MOST_BYTES = 1 << 18 };

typedef int opener(const char *path, int flags, ...);

/* A real converter's last digits. No value comes twice among five updates, so that one that was not read hides none. */
static const int FLICKER[] = {0, 1, -1, 2, -2};

/* --- the clock --------------------------------------------------------------------------------------------------- */

/* As `tests.fakes.held_clock` writes it, of the machine's monotonic clock. An odd version is being written. */
struct clock_file { volatile long long version, looked_us, held_us, most_us, wall_ahead_us, boot_ahead_us; };

static long long real_us(clockid_t which)
{
    struct timespec now;
    syscall(SYS_clock_gettime, which, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

static const struct clock_file *clock_file(void)
{
    static const struct clock_file *mapped;
    const char *path = getenv("FAKE_CLOCK");
    int file;
    void *found;
    if (mapped || !path || (file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC)) < 0)
        return mapped;
    found = mmap(NULL, sizeof *mapped, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    return mapped = found == MAP_FAILED ? NULL : found;
}

static long long shown_us(clockid_t which)
{
    const struct clock_file *file = clock_file();
    long long version, looked_us, held_us, now_us;
    if (!file)
        return real_us(which);
    do {
        version = file->version;
        __sync_synchronize();
        looked_us = file->looked_us;
        held_us = file->held_us;
        __sync_synchronize();
    } while (version % 2 || version != file->version);
    now_us = real_us(CLOCK_MONOTONIC);
    if (now_us > looked_us + file->most_us)
        now_us = looked_us + file->most_us;
    return now_us - held_us
        + (which == CLOCK_REALTIME ? file->wall_ahead_us : which == CLOCK_BOOTTIME ? file->boot_ahead_us : 0);
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    long long us = shown_us(CLOCK_REALTIME);
    (void)zone;
    now->tv_sec = us / 1000000;
    now->tv_usec = us % 1000000;
    return 0;
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    long long us;
    if (!clock_file() || (which != CLOCK_REALTIME && which != CLOCK_MONOTONIC && which != CLOCK_BOOTTIME))
        return (int)syscall(SYS_clock_gettime, which, now);
    us = shown_us(which);
    now->tv_sec = us / 1000000;
    now->tv_nsec = us % 1000000 * 1000;
    return 0;
}

/* Errors and signals as the machine's: 0, or what nanosleep left in errno. */
static int sleep_until(clockid_t which, long long until_us)
{
    for (long long left_us; (left_us = until_us - shown_us(which)) > 0;) {
        struct timespec left = {left_us / 1000000, left_us % 1000000 * 1000};
        if (syscall(SYS_nanosleep, &left, NULL) != 0)
            return errno;
    }
    return 0;
}

static long long us_of(const struct timespec *time)
{
    return time->tv_sec * 1000000LL + (time->tv_nsec + 999) / 1000;
}

int nanosleep(const struct timespec *length, struct timespec *left)
{
    if (!clock_file())
        return (int)syscall(SYS_nanosleep, length, left);
    return sleep_until(CLOCK_MONOTONIC, shown_us(CLOCK_MONOTONIC) + us_of(length)) == 0 ? 0 : -1;
}

int clock_nanosleep(clockid_t which, int flags, const struct timespec *time, struct timespec *left)
{
    if (!clock_file())
        return syscall(SYS_clock_nanosleep, which, flags, time, left) == 0 ? 0 : errno;
    return sleep_until(which, us_of(time) + (flags & TIMER_ABSTIME ? 0 : shown_us(which)));
}

/* --- gauges ------------------------------------------------------------------------------------------------------ */

static char *text_of(int file)
{
    char *text = malloc(MOST_BYTES + 1);
    size_t n = 0;
    ssize_t more;
    while (text && n < MOST_BYTES && (more = read(file, text + n, MOST_BYTES - n)) > 0)
        n += (size_t)more;
    if (text)
        text[n] = 0;
    return text;
}

/* The last whole line that begins with a time up to at_us: what follows the time; NULL where there is none. */
static const char *holding(const char *text, long long at_us)
{
    const char *found = NULL, *end;
    for (; (end = strchr(text, '\n')); text = end + 1) {
        char *rest;
        long long from_us = strtoll(text, &rest, 10);
        if (rest != text && from_us <= at_us)
            found = rest;
    }
    return found;
}

static double watts_at(opener *real_open, const char *path, long long at_us)
{
    int file = real_open(path, O_RDONLY | O_CLOEXEC);
    char *text = file < 0 ? NULL : text_of(file);
    const char *line = text ? holding(text, at_us) : NULL;
    double watts = line ? strtod(line, NULL) : 0;
    free(text);
    if (file >= 0)
        close(file);
    return watts;
}

/* A file that holds the text, in the place of the opened one. */
static int in_place(int file, int flags, const char *text)
{
    int told = memfd_create("told", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
    if (told < 0 || write(told, text, strlen(text)) < 0)
        return file;
    lseek(told, 0, SEEK_SET);
    close(file);
    return told;
}

/* The opened file, or in its place what the gauge shows now. */
static int shown(opener *real_open, int file, int flags)
{
    char *text = text_of(file), draws[4096], value[32];
    long long begun_us, update_us, k, at_us;
    double per_watt = 0, more = 0;
    int flickers = 0;
    const char *line;
    if (!text || sscanf(text, "@ %lld %lld %4095s", &begun_us, &update_us, draws) != 3) {
        free(text);
        lseek(file, 0, SEEK_SET);
        return file;
    }
    k = (shown_us(CLOCK_REALTIME) - begun_us) / update_us;
    at_us = begun_us + k * update_us;
    if ((line = holding(text, at_us)))
        sscanf(line, "%lf %lf %d", &per_watt, &more, &flickers);
    if (per_watt != 0)
        more += watts_at(real_open, draws, at_us) * per_watt;
    free(text);
    more += (more < 0 ? -0.5 : 0.5);
    snprintf(value, sizeof value, "%lld\n", (long long)more + (flickers ? FLICKER[k % 5] : 0));
    return in_place(file, flags, value);
}

static int uptime(int file, int flags)
{
    char text[64];
    snprintf(text, sizeof text, "%.2f 0.00\n", shown_us(CLOCK_BOOTTIME) / 10000 / 100.0);
    return in_place(file, flags, text);
}

/* What the phone's programs see instead of a file that they opened. */
static int seen(opener *real_open, int file, const char *path, int flags)
{
    if (file < 0 || (flags & O_ACCMODE) != O_RDONLY)
        return file;
    if (strstr(path, "current_now"))
        return shown(real_open, file, flags);
    return clock_file() && strcmp(path, "/proc/uptime") == 0 ? uptime(file, flags) : file;
}

#define MODE_OF(flags) \
    va_list more; \
    mode_t mode; \
    va_start(more, flags); \
    mode = (flags) & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more)

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        opener *real = (opener *)dlsym(RTLD_NEXT, #name); \
        MODE_OF(flags); \
        int file = real(path, flags, mode); \
        return seen(real, file, path, flags); \
    }

#define OPEN_AT(name) \
    int name(int folder, const char *path, int flags, ...) \
    { \
        int (*real)(int, const char *, int, ...) = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        MODE_OF(flags); \
        int file = real(folder, path, flags, mode); \
        opener *plain = (opener *)dlsym(RTLD_NEXT, "open"); \
        return seen(plain, file, path, flags); \
    }

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)
