/* A machine's NVML as far as energy is concerned, for tests on machines without an NVIDIA GPU.
 *
 * State is read anew at every call from the text file that FAKE_NVML names, so that a test can lose a GPU while a meter
 * runs. One "key value" a line; what is absent has its default:
 *
 *   init 0             result of nvmlInit (9: the driver is not loaded)
 *   gpus 1             how many there are
 *   watts 100          constant power of GPU 0; GPU i has (i + 1) times as much
 *   tick_ms 20         the energy counter is renewed this often
 *   energy 0           result of reading the counter (3: not supported, 15: the GPU is lost)
 *   now_s 0            what the library takes for the time; 0: FAKE_NVML_NOW_S of the environment, or CLOCK_MONOTONIC
 *   freeze_s 0         time from which the counter stands still, for
 *   frozen_for_s 1e9   so long; then it goes on from there
 *   restart_s 0        time at which the counter starts again from 0, as after a reset of the driver
 *   power 0            result of reading the power, instantaneous or not
 *   instant 0          result of the field of instantaneous power
 *   power_scale 1      what the power sensor shows over what the counter counts
 *   swapped 0          1: GPUs 0 and 1 have each other's number
 *   mixed 0            1: each GPU is of a model of its own
 *   mig 0              1: split into instances; GPUs without MIG answer 3 in nvmlDeviceGetMigMode (mig 3)
 *   reasons 0          bit mask of clock event reasons
 *   events 0           result of reading them by the call of driver 535 and later
 *   throttle 0         result of reading them by the call that was before it
 *   set_limit_w 0      power limit that the owner set; 0: it cannot be read
 *   others 0           process id of a program of others that has GPU 0 open beside the caller; 0: none
 *   unlisted 0         1: the caller is not listed itself, as in a container whose driver tells ids of the machine
 *   architecture 9     5: Volta, 7: Ampere ... 9: Hopper
 *   capability 90      of CUDA: 80 is a GA100, 86 another Ampere
 *   told 0             result of asking for either
 *
 * Result codes are NVML's (nvml.h). Before nvmlInit and after nvmlShutdown every call answers 1, uninitialised.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
enum { ARCHITECTURE_HOPPER = 9 };
enum { MOST_GPUS = 8 };
enum { POWER_AVERAGE = 185, POWER_INSTANT = 186 };

typedef struct gpu { unsigned index; } gpu;

static gpu gpus[MOST_GPUS];
static int live_sessions;

static double state(const char *wanted, double fallback)
{
    const char *path = getenv("FAKE_NVML");
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
    double told_s = state("now_s", 0);
    const char *stepped_s = getenv("FAKE_NVML_NOW_S");
    if (told_s > 0)
        return told_s;
    if (stepped_s)
        return atof(stepped_s);
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static double watts(const gpu *device)
{
    return state("watts", 100) * (device->index + 1);
}

int nvmlInitWithFlags(unsigned flags)
{
    int result = (int)state("init", SUCCESS);
    (void)flags;
    if (result == SUCCESS)
        live_sessions++;
    return result;
}

int nvmlShutdown(void)
{
    if (live_sessions == 0)
        return UNINITIALIZED;
    live_sessions--;
    return SUCCESS;
}

const char *nvmlErrorString(int result)
{
    switch (result) {
    case UNINITIALIZED: return "Uninitialized";
    case NOT_SUPPORTED: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    if (live_sessions == 0)
        return UNINITIALIZED;
    *count = (unsigned)state("gpus", 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu **device)
{
    if (live_sessions == 0)
        return UNINITIALIZED;
    if (index >= MOST_GPUS || index >= (unsigned)state("gpus", 1))
        return INVALID_ARGUMENT;
    gpus[index].index = index;
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(gpu *device, unsigned long long *energy_mj)
{
    int result = live_sessions == 0 ? UNINITIALIZED : (int)state("energy", SUCCESS);
    double tick_s = state("tick_ms", 20) * 1e-3, restart_s = state("restart_s", 0);
    double shown_s = tick_s * (double)(long long)(now_s() / tick_s);
    double freeze_s = state("freeze_s", 0), frozen_for_s = state("frozen_for_s", 1e9);
    if (freeze_s > 0 && shown_s > freeze_s)
        shown_s = shown_s < freeze_s + frozen_for_s ? freeze_s : shown_s - frozen_for_s;
    if (result == SUCCESS)
        *energy_mj = (unsigned long long)(watts(device) * 1e3 * (shown_s >= restart_s ? shown_s - restart_s : shown_s));
    return result;
}

int nvmlDeviceGetPowerUsage(gpu *device, unsigned *power_mw)
{
    int result = live_sessions == 0 ? UNINITIALIZED : (int)state("power", SUCCESS);
    if (result == SUCCESS)
        *power_mw = (unsigned)(watts(device) * 1e3 * state("power_scale", 1));
    return result;
}

struct field_value {
    uint32_t field, scope;
    int64_t timestamp_us, latency_us;
    unsigned type;
    int result;
    union { unsigned number; unsigned long long long_number; } value;
};

int nvmlDeviceGetFieldValues(gpu *device, int count, struct field_value *values)
{
    if (live_sessions == 0)
        return UNINITIALIZED;
    for (int i = 0; i < count; i++) {
        int result = (int)state("instant", SUCCESS);
        int is_average = values[i].field == POWER_AVERAGE;
        values[i].result = is_average ? SUCCESS : values[i].field == POWER_INSTANT ? result : NOT_SUPPORTED;
        if (values[i].result == SUCCESS)
            values[i].result = nvmlDeviceGetPowerUsage(device, &values[i].value.number);
    }
    return SUCCESS;
}

int nvmlDeviceGetMigMode(gpu *device, unsigned *current, unsigned *pending)
{
    int mode = (int)state("mig", 0);
    (void)device;
    if (mode == NOT_SUPPORTED)
        return NOT_SUPPORTED;
    *current = *pending = (unsigned)mode;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(gpu *device, unsigned long long *reasons)
{
    (void)device;
    *reasons = (unsigned long long)state("reasons", 0);
    return (int)state("events", SUCCESS);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(gpu *device, unsigned long long *reasons)
{
    (void)device;
    *reasons = (unsigned long long)state("reasons", 0);
    return (int)state("throttle", SUCCESS);
}

/* What a power reading means depends on it; Zeus asks it too. */
int nvmlDeviceGetArchitecture(gpu *device, unsigned *architecture)
{
    (void)device;
    *architecture = (unsigned)state("architecture", ARCHITECTURE_HOPPER);
    return (int)state("told", SUCCESS);
}

int nvmlDeviceGetCudaComputeCapability(gpu *device, int *major, int *minor)
{
    int capability = (int)state("capability", 90);
    (void)device;
    *major = capability / 10;
    *minor = capability % 10;
    return (int)state("told", SUCCESS);
}

/* The least and the most that its power may be limited to; state limit_w. */
int nvmlDeviceGetPowerManagementLimitConstraints(gpu *device, unsigned *least, unsigned *most)
{
    double limit_w = state("limit_w", 0);
    (void)device;
    *least = (unsigned)(limit_w * 1000 / 4);
    *most = (unsigned)(limit_w * 1000);
    return limit_w > 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetPowerManagementLimit(gpu *device, unsigned *limit_mw)
{
    double limit_w = state("set_limit_w", 0);
    (void)device;
    *limit_mw = (unsigned)(limit_w * 1000);
    return limit_w > 0 ? SUCCESS : NOT_SUPPORTED;
}

struct process_info { unsigned pid; unsigned long long used_bytes; unsigned gpu_instance, compute_instance; };

int nvmlDeviceGetComputeRunningProcesses_v3(gpu *device, unsigned *count, struct process_info *found)
{
    unsigned pids[2], n = 0, room = *count, other = (unsigned)state("others", 0);
    if (live_sessions == 0)
        return UNINITIALIZED;
    if (state("unlisted", 0) == 0)
        pids[n++] = (unsigned)getpid();
    if (other > 0 && device->index == 0)
        pids[n++] = other;
    *count = n;
    if (n > room)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < n; i++)
        found[i] = (struct process_info){pids[i], 1u << 20, ~0u, ~0u};
    return SUCCESS;
}

/* What Zeus asks besides, and what a host is told to be. */

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    if (!live_sessions)
        return UNINITIALIZED;
    snprintf(version, length, "%d.65.06", (int)state("driver", 580));
    return SUCCESS;
}

int nvmlDeviceGetUUID(gpu *device, char *uuid, unsigned length)
{
    unsigned of = state("swapped", 0) > 0 && device->index < 2 ? 1 - device->index : device->index;
    if (!live_sessions)
        return UNINITIALIZED;
    snprintf(uuid, length, "GPU-fake-%u", of);
    return SUCCESS;
}

int nvmlDeviceGetName(gpu *device, char *name, unsigned length)
{
    snprintf(name, length, state("mixed", 0) > 0 ? "Fake GPU %u" : "Fake GPU", device->index);
    return SUCCESS;
}

int nvmlDeviceGetC2cModeInfoV(gpu *device, void *mode)
{
    (void)device;
    (void)mode;
    return NOT_SUPPORTED;
}
