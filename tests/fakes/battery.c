/* Stands before libc in the processes of a fake phone (LD_PRELOAD): whoever opens a gauge there reads the value of its
 * last update, which the time of opening alone decides. No thread renews it, so none can be late.
 *
 * A gauge is a file called ...current_now whose text begins with
 *
 *   @ BEGUN_US UPDATE_US DRAWS          when its updates began, how far apart they are, and the file of the phone's power
 *   FROM_US PER_WATT MORE FLICKERS      one line a setting: its value is watts * PER_WATT + MORE, and a flicker
 *
 * and a line of DRAWS is "FROM_US WATTS". Of the lines whose time has come at an update, the last one holds: a program
 * may write now when its power will end, and a later one overrides it. Times are of CLOCK_REALTIME, which shells have.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { MOST_BYTES = 1 << 18 };

typedef int opener(const char *path, int flags, ...);

/* A real converter's last digits. No value comes twice among five updates, so that one that was not read hides none. */
static const int FLICKER[] = {0, 1, -1, 2, -2};

static long long now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

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

/* The opened file, or in its place what the gauge shows now. */
static int shown(opener *real_open, int file, int flags)
{
    char *text = text_of(file), draws[4096], value[32];
    long long begun_us, update_us, k, at_us;
    double per_watt = 0, more = 0;
    int flickers = 0, told;
    const char *line;
    if (!text || sscanf(text, "@ %lld %lld %4095s", &begun_us, &update_us, draws) != 3) {
        free(text);
        lseek(file, 0, SEEK_SET);
        return file;
    }
    k = (now_us() - begun_us) / update_us;
    at_us = begun_us + k * update_us;
    if ((line = holding(text, at_us)))
        sscanf(line, "%lf %lf %d", &per_watt, &more, &flickers);
    if (per_watt != 0)
        more += watts_at(real_open, draws, at_us) * per_watt;
    free(text);
    snprintf(value, sizeof value, "%lld\n", (long long)(more < 0 ? more - 0.5 : more + 0.5) + (flickers ? FLICKER[k % 5] : 0));
    told = memfd_create("current_now", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
    if (told < 0 || write(told, value, strlen(value)) < 0)
        return file;
    lseek(told, 0, SEEK_SET);
    close(file);
    return told;
}

static int is_gauge(const char *path, int flags)
{
    return (flags & O_ACCMODE) == O_RDONLY && strstr(path, "current_now") != NULL;
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
        return file >= 0 && is_gauge(path, flags) ? shown(real, file, flags) : file; \
    }

#define OPEN_AT(name) \
    int name(int folder, const char *path, int flags, ...) \
    { \
        int (*real)(int, const char *, int, ...) = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        MODE_OF(flags); \
        int file = real(folder, path, flags, mode); \
        opener *plain = (opener *)dlsym(RTLD_NEXT, "open"); \
        return file >= 0 && is_gauge(path, flags) ? shown(plain, file, flags) : file; \
    }

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)
